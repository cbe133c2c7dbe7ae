"""The optimal token baseline, by hand and against a slow reference written from the formula."""

from __future__ import annotations

import math

import pytest
import torch

from rlgraph.nodes.advantage.baseline import optimal_token_baseline
from rlgraph.nodes.support.ragged import Ragged

# tool output inside a row, nothing written, no tokens at all, a group of one, groups that interleave
MASK = [[False, True, True, False, True], [False, True], [False, False], [], [True] * 3, [True, True]]
GROUP = [7, 7, 7, 7, 2, 7]
REWARDS = [[9.0, -0.1, -0.2, 9.0, 1.0], [9.0, 0.5], [9.0, 9.0], [], [0.0, -0.3, 0.25], [0.5, 2.0]]


def columns(seed: int = 0) -> tuple[Ragged, Ragged, Ragged, Ragged, torch.Tensor]:
    """Rewards, log-probs, sums of squared probabilities (at least p^2), mask, groups."""
    draw = torch.Generator().manual_seed(seed)
    mask = Ragged.of(MASK, torch.bool)
    chosen = torch.rand(len(mask.values), generator=draw)
    rest = (1 - chosen) * torch.rand(len(mask.values), generator=draw)
    zero = torch.zeros(())
    logprobs = torch.where(mask.values, chosen.log(), zero)
    squares = torch.where(mask.values, chosen.square() + rest.square(), zero)
    return (
        Ragged.of(REWARDS, torch.float32),
        mask.like(logprobs),
        mask.like(squares),
        mask,
        torch.tensor(GROUP),
    )


def slow(
    rewards: Ragged, logprobs: Ragged, squares: Ragged, mask: Ragged, group: torch.Tensor
) -> list[list[float]]:
    """The formula, token by token: each sample's written tokens are counted from 0."""
    to_go: list[dict[int, float]] = []
    weight: list[dict[int, float]] = []
    for row in range(len(mask)):
        at = [t for t, mine in enumerate(mask[row].tolist()) if mine]
        reward = [rewards[row].tolist()[t] for t in at]
        each = [1 - 2 * math.exp(logprobs[row].tolist()[t]) + squares[row].tolist()[t] for t in at]
        to_go.append({n: sum(reward[n:]) for n in range(len(at))})
        weight.append({n: sum(each[: n + 1]) for n in range(len(at))})
    found = []
    for row in range(len(mask)):
        out, step = [], -1
        for mine in mask[row].tolist():
            step += mine
            peers = [p for p in range(len(mask)) if group[p] == group[row] and step in to_go[p]]
            above = sum(to_go[p][step] * weight[p][step] for p in peers) if mine else 0.0
            below = sum(weight[p][step] for p in peers) if mine else 0.0
            baseline = above / (below + 1e-8) if len(peers) > 1 else 0.0
            out.append(to_go[row][step] - baseline if mine else 0.0)
        found.append(out)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_it_is_its_formula(seed: int) -> None:
    given = columns(seed)
    out = optimal_token_baseline(*given)
    assert out.values.dtype == torch.float32
    for row, expected in enumerate(slow(*given)):
        assert out[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_by_hand() -> None:
    # two samples of two tokens, one that earns 1 and one that earns 0. Of two equally likely tokens each is
    # drawn with p = 1/2: 1 - 1 + 1/2 = 1/2; one that is certain adds 1 - 2 + 1 = 0
    half, mask = math.log(0.5), Ragged.of([[True, True], [True, True]], torch.bool)
    logprobs = Ragged.of([[half, 0.0], [half, half]])
    squares = Ragged.of([[0.5, 1.0], [0.5, 0.5]])
    rewards = Ragged.of([[0.0, 1.0], [0.0, 0.0]])
    out = optimal_token_baseline(rewards, logprobs, squares, mask, torch.tensor([0, 0]))
    # t = 1: weights 1/2 and 1/2, baseline 1/2. t = 2: 1/2 and 1, baseline (1 x 1/2) / (3/2) = 1/3
    assert out[0].tolist() == pytest.approx([1 / 2, 2 / 3])
    assert out[1].tolist() == pytest.approx([-1 / 2, -1 / 3])


def test_what_has_nothing_to_be_compared_with_keeps_its_return() -> None:
    half = math.log(0.5)
    mask = Ragged.of([[True, True, True], [True], [True, True]], torch.bool)
    logprobs, squares = mask.like(torch.full((6,), half)), mask.like(torch.full((6,), 0.5))
    rewards = Ragged.of([[0.0, 0.0, 3.0], [1.0], [1.0, 2.0]])
    out = optimal_token_baseline(rewards, logprobs, squares, mask, torch.tensor([0, 0, 1]))
    assert out[0].tolist() == pytest.approx([1.0, 3.0, 3.0]), "the others of its group have ended"
    assert out[1].tolist() == pytest.approx([-1.0])
    assert out[2].tolist() == pytest.approx([3.0, 2.0]), "a group of one"


def test_tokens_that_were_certain_weigh_nothing() -> None:
    """A baseline of no weight is 0, not 0 / 0; rounding makes no weight negative."""
    mask = Ragged.of([[True], [True]], torch.bool)
    certain, over = Ragged.of([[0.0], [0.0]]), Ragged.of([[1 - 1e-7], [1.0]])
    out = optimal_token_baseline(Ragged.of([[1.0], [0.0]]), certain, over, mask, torch.tensor([0, 0]))
    assert out.tolist() == [[1.0], [0.0]]


def test_neither_order_nor_neighbours_show() -> None:
    rewards, logprobs, squares, mask, group = columns()
    whole, order = optimal_token_baseline(*columns()), torch.tensor([4, 2, 5, 0, 3, 1])
    moved = [column.take(order) for column in (rewards, logprobs, squares, mask)]
    out = optimal_token_baseline(moved[0], moved[1], moved[2], moved[3], group[order])
    torch.testing.assert_close(out.values, whole.take(order).values)
    alone = torch.tensor([0, 1, 2, 3, 5])  # one group
    part = [column.take(alone) for column in (rewards, logprobs, squares, mask)]
    out = optimal_token_baseline(part[0], part[1], part[2], part[3], group[alone])
    torch.testing.assert_close(out.values, whole.take(alone).values)


def test_of_no_rows() -> None:
    empty = Ragged.of([], torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    assert optimal_token_baseline(empty, empty, empty, Ragged.of([], torch.bool), none).tolist() == []


def test_it_is_the_baseline_of_least_variance() -> None:
    """At the first token of many samples: no other number gives less variance to (G - b) times the gradient.

    Policy: a softmax over three tokens; the squared norm of the gradient of log p_y with regard to the
    logits is 1 - 2 p_y + sum p^2.
    """
    draw = torch.Generator().manual_seed(0)
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    tokens = torch.multinomial(p, 4000, replacement=True, generator=draw)
    earned = torch.tensor([1.0, 0.2, -2.0])[tokens] + torch.randn(4000, generator=draw)
    mask = Ragged.of([[True]] * 4000, torch.bool)
    logprobs, squares = mask.like(p[tokens].log().float()), mask.like(p.square().sum().repeat(4000).float())
    group = torch.zeros(4000, dtype=torch.int64)
    out = optimal_token_baseline(mask.like(earned), logprobs, squares, mask, group)
    gradients = torch.eye(3, dtype=torch.float64)[tokens] - p

    def spread(b: float) -> float:
        return float(((earned.double() - b)[:, None] * gradients).square().sum(-1).mean())

    found = float((earned - out.values).mean())
    assert spread(found) < min(spread(found - 0.05), spread(found + 0.05))
    assert spread(found) < spread(float(earned.mean()))
