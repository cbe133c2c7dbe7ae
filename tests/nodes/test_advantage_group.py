"""Estimators that compare the samples of a group, against slow references written from the formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch

from rlgraph.nodes.advantage.group import gpg, grpo, maxrl, opo, reinforce_pp_baseline, rloo
from rlgraph.nodes.support.ragged import Ragged

# rows: of two groups and of one alone; one has nothing in its loss mask, one is empty
MASK = [[False, True, True, False, True], [False, True], [False, False], [True, False, True], [], [True] * 4]
REWARDS = [1.0, 0.0, 0.5, 0.25, 3.0, 0.75]
GROUP = [7, 2, 7, 2, 5, 7]

Numbers = list[float]


def mask() -> Ragged:
    return Ragged.of(MASK, torch.bool)


def peers(rewards: Numbers, group: list[int], sample: int) -> list[int]:
    return [other for other in range(len(rewards)) if group[other] == group[sample]]


def mean_of(rewards: Numbers, group: list[int], sample: int) -> float:
    own = [rewards[other] for other in peers(rewards, group, sample)]
    return statistics.mean(own) if len(own) > 1 else 0.0


def centred(rewards: Numbers, group: list[int]) -> Numbers:
    return [reward - mean_of(rewards, group, sample) for sample, reward in enumerate(rewards)]


def over_tokens(numbers: Numbers) -> list[Numbers]:
    return [[n if w else 0.0 for w in written] for n, written in zip(numbers, MASK, strict=True)]


def slow_grpo(rewards: Numbers, group: list[int]) -> list[Numbers]:
    out = []
    for sample, number in enumerate(centred(rewards, group)):
        own = [rewards[other] for other in peers(rewards, group, sample)]
        out.append(number / ((statistics.stdev(own) if len(own) > 1 else 1.0) + 1e-6))
    return over_tokens(out)


def slow_dr_grpo(rewards: Numbers, group: list[int]) -> list[Numbers]:
    return over_tokens(centred(rewards, group))


def slow_rloo(rewards: Numbers, group: list[int]) -> list[Numbers]:
    out = []
    for sample, reward in enumerate(rewards):
        others = [rewards[other] for other in peers(rewards, group, sample) if other != sample]
        out.append(reward - (sum(others) / len(others) if others else 0.0))
    return over_tokens(out)


def slow_reinforce_pp_baseline(rewards: Numbers, group: list[int]) -> list[Numbers]:
    rows = over_tokens(centred(rewards, group))
    kept = [
        n for row, written in zip(rows, MASK, strict=True) for n, w in zip(row, written, strict=True) if w
    ]
    mean, deviation = statistics.mean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    return over_tokens([(number - mean) / deviation for number in centred(rewards, group)])


def slow_opo(rewards: Numbers, group: list[int]) -> list[Numbers]:
    lengths, out = [sum(written) for written in MASK], []
    for sample, reward in enumerate(rewards):
        own = peers(rewards, group, sample)
        weight = sum(lengths[other] for other in own)
        baseline = sum(lengths[other] * rewards[other] for other in own) / weight if weight else 0.0
        out.append(reward - (baseline if len(own) > 1 else 0.0))
    return over_tokens(out)


def slow_gpg(rewards: Numbers, group: list[int]) -> list[Numbers]:
    numbers = centred(rewards, group)
    felt = sum(abs(number) > 1e-6 for number in numbers)
    return over_tokens([len(numbers) / max(felt, 1) * number for number in numbers])


def slow_maxrl(rewards: Numbers, group: list[int]) -> list[Numbers]:
    means = [
        statistics.mean(rewards[o] for o in peers(rewards, group, sample)) for sample in range(len(rewards))
    ]
    return over_tokens([(s - mu) / mu if mu > 0 else 0.0 for s, mu in zip(rewards, means, strict=True)])


def dr_grpo(rewards: torch.Tensor, group: torch.Tensor, loss_mask: Ragged) -> Ragged:
    return grpo(rewards, group, loss_mask, scale=False)


Estimator = Callable[[torch.Tensor, torch.Tensor, Ragged], Ragged]
SLOW: dict[Estimator, Callable[[Numbers, list[int]], list[Numbers]]] = {
    grpo: slow_grpo,
    dr_grpo: slow_dr_grpo,
    rloo: slow_rloo,
    reinforce_pp_baseline: slow_reinforce_pp_baseline,
    opo: slow_opo,
    gpg: slow_gpg,
    maxrl: slow_maxrl,
}
each = pytest.mark.parametrize("estimator", SLOW)


def groups(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@each
@pytest.mark.parametrize("group", [GROUP, [0] * 6, [1, 1, 2, 2, 3, 3], [5, 4, 3, 2, 1, 0]])
def test_an_estimator_is_its_formula(estimator: Estimator, group: list[int]) -> None:
    out = estimator(torch.tensor(REWARDS), torch.tensor(group), mask())
    for row, expected in enumerate(SLOW[estimator](REWARDS, group)):
        assert out[row].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert out.values.dtype == torch.float32


@each
def test_it_does_not_depend_on_the_order_of_rows(estimator: Estimator) -> None:
    order = torch.tensor([3, 5, 4, 0, 2, 1])
    rewards, group = torch.tensor(REWARDS), torch.tensor(GROUP)
    out = estimator(rewards, group, mask())
    moved = estimator(rewards[order], group[order], mask().take(order))
    torch.testing.assert_close(moved.values, out.take(order).values)


@each
def test_of_no_rows_and_of_no_tokens(estimator: Estimator) -> None:
    assert estimator(torch.zeros(0), groups(), Ragged.of([], torch.bool)).tolist() == []
    nothing = Ragged.of([[False, False], []], torch.bool)
    assert estimator(torch.tensor([1.0, 0.0]), groups(3, 3), nothing).tolist() == [[0.0, 0.0], []]


@each
def test_equal_rewards_are_no_signal(estimator: Estimator) -> None:
    out = estimator(torch.full((6,), 0.1), torch.zeros(6, dtype=torch.int64), mask())
    assert out.values.tolist() == pytest.approx([0.0] * 16, abs=1e-6)


@pytest.mark.parametrize("estimator", [grpo, rloo, opo])
def test_a_group_that_a_filter_cut_is_a_smaller_group(estimator: Estimator) -> None:
    rows, rewards = torch.tensor([0, 1, 3]), torch.tensor(REWARDS)
    out = estimator(rewards[rows], torch.tensor(GROUP)[rows], mask().take(rows))
    # of group 7 only row 0 is left: a group of one, with baseline 0; group 2 is whole
    assert out[0].tolist() == pytest.approx([0.0, 1.0, 1.0, 0.0, 1.0], rel=1e-5)
    whole = estimator(rewards, torch.tensor(GROUP), mask())
    torch.testing.assert_close(out.take(torch.tensor([1, 2])).values, whole.take(torch.tensor([1, 3])).values)


FOUR = Ragged.of([[True]] * 4)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (grpo, [math.sqrt(3) / 2 * s for s in (1, -1, -1, 1)]),
        (rloo, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),  # 1 less the mean of 0, 0, 1
        (reinforce_pp_baseline, [math.sqrt(3) / 2 * s for s in (1, -1, -1, 1)]),
        (opo, [0.5, -0.5, -0.5, 0.5]),
        (gpg, [0.5, -0.5, -0.5, 0.5]),
    ],
)
def test_right_wrong_wrong_right_by_hand(estimator: Estimator, expected: Numbers) -> None:
    out = estimator(torch.tensor([1.0, 0.0, 0.0, 1.0]), groups(0, 0, 0, 0), FOUR)
    assert out.values.tolist() == pytest.approx(expected, rel=1e-5)


def test_opo_weighs_rewards_by_length_by_hand() -> None:
    loss_mask = Ragged.of([[True] * 3, [False, True]], torch.bool)
    # baseline (3 * 1 + 1 * 0) / 4
    assert opo(torch.tensor([1.0, 0.0]), groups(0, 0), loss_mask).tolist() == [[0.25] * 3, [0.0, -0.75]]


def test_gpg_makes_up_for_samples_without_gradient_by_hand() -> None:
    # the second group is all right: 2 of 4 samples have a gradient, which counts double
    out = gpg(torch.tensor([1.0, 0.0, 1.0, 1.0]), groups(0, 0, 1, 1), FOUR, f_norm=2.0)
    assert out.values.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_reinforce_pp_baseline_is_white() -> None:
    values = reinforce_pp_baseline(torch.tensor(REWARDS), torch.tensor(GROUP), mask()).values[mask().values]
    assert (values.mean().item(), values.var().item()) == pytest.approx((0.0, 1.0), abs=1e-5)


def test_maxrl_has_the_gradient_of_the_log_of_the_share_that_is_right() -> None:
    """Expected over the samples of a prompt, it is that of log p cut off after n - 1 terms.

    d/dp sum_{k < n} -(1 - p)^k / k = (1 - (1 - p)^(n - 1)) / p, and the score of a sample is 1 / p where
    it is right and -1 / (1 - p) where it is not.
    """
    n, p = 4, 0.3
    expected = 0.0
    for right in range(n + 1):
        rewards = torch.tensor([1.0] * right + [0.0] * (n - right))
        out = maxrl(rewards, torch.zeros(n, dtype=torch.int64), Ragged.of([[True]] * n)).values.double()
        score = torch.where(rewards > 0, 1 / p, -1 / (1 - p))
        chance = math.comb(n, right) * p**right * (1 - p) ** (n - right)
        expected += chance * float((out * score).mean())
    assert expected == pytest.approx((1 - (1 - p) ** (n - 1)) / p, rel=1e-5)


def test_maxrl_of_a_group_that_earns_nothing_is_nothing() -> None:
    for reward in (0.0, -1.0):
        rewards = torch.tensor([reward, reward, 2 * reward, reward])
        assert maxrl(rewards, groups(0, 0, 0, 0), Ragged.of([[True]] * 4)).values.tolist() == [0.0] * 4
