"""Filters against cases worked by hand."""

from __future__ import annotations

import pytest
import torch

from recorded import means
from rlgraph.nodes.select.filter import best, mixed, threshold, widest
from rlgraph.ops import Context


def kept(rewards: list[float], group: list[int], **attributes: float) -> list[bool]:
    context = Context("filter", 0, 0)
    found = mixed(context, torch.tensor(rewards), torch.tensor(group), **attributes)
    assert means(context)["filter/kept"] == (float(found.sum()), len(group))
    return found.tolist()


def test_groups_whose_rewards_differ_stay_whole() -> None:
    assert kept([1, 0, 1, 1, 0.25, 0.75], [0, 0, 1, 1, 2, 2]) == [True, True, False, False, True, True]


def test_groups_need_not_be_contiguous_nor_numbered_from_0() -> None:
    assert kept([1, 5, 0, 5], [7, 9, 7, 9]) == [True, False, True, False]


@pytest.mark.parametrize(("least", "stays"), [(0.5, True), (0.71, False)])
def test_the_standard_deviation_is_unbiased(least: float, stays: bool) -> None:
    # of 1 and 0 it is sqrt(0.5) = 0.7071
    assert kept([1, 0], [0, 0], min_std=least) == [stays, stays]


def test_a_group_of_one_goes_and_no_rows_are_no_rows() -> None:
    assert kept([1.0], [0]) == [False]
    assert mixed(Context("f", 0, 0), torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_equal_rewards_do_not_differ_by_rounding() -> None:
    assert kept([0.1] * 7, [0] * 7) == [False] * 7


def test_threshold_keeps_samples_from_the_least_reward_on() -> None:
    context = Context("correct", 0, 0)
    assert threshold(context, torch.tensor([1.0, 0.5, 0.49, -1.0]), min=0.5).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert means(context) == {"correct/kept": (2.0, 4)}
    assert threshold(context, torch.zeros(0), min=0.5).tolist() == []


@pytest.mark.parametrize(
    ("groups", "stay"),
    [(1, {3}), (2, {3, 1}), (3, {3, 1, 0}), (4, {3, 1, 0, 2}), (9, {3, 1, 0, 2, 8})],
)
def test_widest_keeps_the_groups_whose_rewards_differ_most(groups: int, stay: set[int]) -> None:
    # deviations: 0 of groups 0, 2 and of the single 8, of which the lowest numbers come first
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 8])
    rewards = torch.tensor([1.0, 1.0, 0.5, 0.0, 0.1, 0.1, 0.0, 1.0, 9.0])
    context = Context("widest", 0, 0)
    kept = widest(context, rewards, group, groups=groups)
    assert set(group[kept].tolist()) == stay
    assert means(context)["widest/kept"] == (float(kept.sum()), 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert widest(context, rewards[order], group[order], groups=groups).equal(kept[order])


def test_best_keeps_one_of_each_group_the_first_of_equals() -> None:
    context, group = Context("best", 0, 0), torch.tensor([5, 2, 5, 2, 5, 8])
    kept = best(context, torch.tensor([0.5, 1.0, 2.0, 1.0, 2.0, -3.0]), group)
    assert kept.tolist() == [False, True, True, False, False, True]
    assert means(context) == {"best/reward": (0.0, 3)}
    nothing = best(Context("b", 0, 0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert nothing.tolist() == []
