"""FIPO against its formula written out; and the discounted sums that it and the estimators take."""

from __future__ import annotations

import math

import pytest
import torch

from rlgraph.nodes.loss.policy import fipo, ppo_clip
from rlgraph.nodes.support.ragged import Ragged

# a tool's output between tokens of the policy, an empty row, one that the policy wrote nothing of
MASK = Ragged.of([[False, True, True, False, True], [], [False, False], [True, True, True]], torch.bool)
TOKENS = len(MASK.values)


def columns(seed: int, spread: float = 0.5) -> list[Ragged]:
    draw = torch.Generator().manual_seed(seed)
    lp, change, advantages = (torch.randn(TOKENS, generator=draw, dtype=torch.float64) for _ in range(3))
    return [MASK.like(lp), MASK.like(lp - spread * change), MASK.like(advantages)]


def slow_weights(lp: Ragged, old: Ragged, half_life: float, low: float, high: float, limit: float) -> list:
    """f_t of each token in the loss mask, 1 of the others."""
    weights = []
    for row, written in enumerate(MASK.tolist()):
        places = [place for place, w in enumerate(written) if w]
        moved = [float(lp[row][place] - old[row][place]) for place in places]
        heard = [0.0 if math.exp(d) > limit else d for d in moved]
        future = {
            place: sum(2 ** (-(k - t) / half_life) * heard[k] for k in range(t, len(places)))
            for t, place in enumerate(places)
        }
        weights += [
            max(low, min(high, math.exp(future[place]))) if place in future else 1.0
            for place in range(len(written))
        ]
    return weights


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("half_life", "less", "more", "limit"), [(32.0, 0.0, 0.2, 10.0), (1.0, 0.5, 3.0, 1.5)]
)
def test_fipo_is_ppo_clip_with_weights_held_fixed(
    seed: int, half_life: float, less: float, more: float, limit: float
) -> None:
    lp, old, advantages = columns(seed)
    weights = torch.tensor(slow_weights(lp, old, half_life, 1 - less, 1 + more, limit), dtype=torch.float64)
    weighed = advantages.like(weights * advantages.values)
    values = lp.values.clone().requires_grad_()
    options = {"half_life": half_life, "less": less, "more": more, "limit": limit}
    losses = fipo(lp.like(values), old, advantages, MASK, clip=0.2, clip_high=0.3, **options)
    (gradient,) = torch.autograd.grad(losses.values.sum(), values)
    other = lp.values.clone().requires_grad_()
    expected = ppo_clip(lp.like(other), old, weighed, clip=0.2, clip_high=0.3, dual_clip=limit)
    (wanted,) = torch.autograd.grad(expected.values.sum(), other)
    written = MASK.values
    torch.testing.assert_close(losses.values[written], expected.values[written])
    torch.testing.assert_close(gradient[written], wanted[written])


def test_fipo_by_hand() -> None:
    # F = ln 1.1 + ln 1.1 / 2, and ln 1.1 of the last; e^F = 1.1^1.5 and 1.1
    mask = Ragged.of([[True, True]], torch.bool)
    old, ones = mask.like(torch.zeros(2, dtype=torch.float64)), mask.like(torch.ones(2, dtype=torch.float64))
    lp = mask.like(torch.full((2,), math.log(1.1), dtype=torch.float64))
    out = fipo(lp, old, ones, mask, half_life=1.0)
    assert out.tolist() == [pytest.approx([-(1.1**2.5), -(1.1**2)])]


def test_before_anything_has_moved_it_is_ppo_clip() -> None:
    lp, _, advantages = columns(0)
    assert fipo(lp, lp, advantages, MASK).values.equal(ppo_clip(lp, lp, advantages).values)


def test_a_row_does_not_hear_of_another() -> None:
    lp, old, advantages = columns(1)
    whole = fipo(lp, old, advantages, MASK, half_life=1000.0, less=1.0, more=9.0)
    for row in range(len(MASK)):
        alone = [column.take(torch.tensor([row])) for column in (lp, old, advantages, MASK)]
        torch.testing.assert_close(fipo(*alone, half_life=1000.0, less=1.0, more=9.0).values, whole[row])


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.97, 1.0])
def test_discounted_sums_are_those_of_a_loop(factor: float) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = [3, 0, 1, 37, 64, 2, 65]
    rows = Ragged.of([torch.randn(n, generator=draw).tolist() for n in lengths], torch.float64)
    expected = []
    for row in rows.tolist():
        sums = []
        for value in reversed(row):
            sums.append(value + factor * (sums[-1] if sums else 0.0))
        expected += reversed(sums)
    assert rows.discounted(factor).tolist() == pytest.approx(expected)
    assert Ragged.of([], torch.float64).discounted(factor).tolist() == []
