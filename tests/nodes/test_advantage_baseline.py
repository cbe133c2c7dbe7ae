"""Estimators with a sampled baseline, against slow references written from the formulas."""

from __future__ import annotations

import pytest
import torch

from rlgraph.nodes.advantage.baseline import remax, running
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context

# one row has tool output in its middle, one nothing in its loss mask, one no tokens
MASK = [[False, True, True, False, True], [False, True], [False, False], [], [True] * 3]
REWARDS = [[9.0, -0.1, -0.2, 9.0, 1.0], [9.0, 0.5], [9.0, 9.0], [], [0.0, -0.3, 0.25]]
GREEDY = [1.0, 0.0, 0.5, 2.0, -1.0]


def slow_remax(rewards: list[float], written: list[bool], greedy: float) -> list[float]:
    """Each token's sum over all counted rewards from it on, less the baseline."""
    return [
        sum(r for r, w in zip(rewards[t:], written[t:], strict=True) if w) - greedy if written[t] else 0.0
        for t in range(len(rewards))
    ]


def columns() -> tuple[Ragged, torch.Tensor, Ragged]:
    return Ragged.of(REWARDS, torch.float32), torch.tensor(GREEDY), Ragged.of(MASK, torch.bool)


def test_remax_is_its_formula() -> None:
    out = remax(*columns())
    for row, (rewards, written, greedy) in enumerate(zip(REWARDS, MASK, GREEDY, strict=True)):
        assert out[row].tolist() == pytest.approx(slow_remax(rewards, written, greedy), abs=1e-6)
    assert out.values.dtype == torch.float32


def test_remax_by_hand() -> None:
    # a penalty of 0.1 on the first token, a score of 1 on the last; the greedy sample earned 0.25
    rewards, loss_mask = Ragged.of([[0.0, -0.1, 0.0, 1.0]]), Ragged.of([[False, True, True, True]])
    assert remax(rewards, torch.tensor([0.25]), loss_mask).values.tolist() == pytest.approx(
        [0.0, 0.65, 0.75, 0.75]
    )


def test_a_sample_that_does_as_well_as_the_greedy_one_is_no_signal() -> None:
    rewards, loss_mask = Ragged.of([[0.0, 1.0]]), Ragged.of([[True, True]])
    assert remax(rewards, torch.tensor([1.0]), loss_mask).values.tolist() == [0.0, 0.0]


def test_remax_does_not_depend_on_the_order_of_rows_nor_on_who_is_beside_them() -> None:
    rewards, greedy, loss_mask = columns()
    whole, order = remax(rewards, greedy, loss_mask), torch.tensor([4, 2, 0, 3, 1])
    moved = remax(rewards.take(order), greedy[order], loss_mask.take(order))
    torch.testing.assert_close(moved.values, whole.take(order).values)
    alone = remax(rewards.take(order[:1]), greedy[order[:1]], loss_mask.take(order[:1]))
    torch.testing.assert_close(alone.values, whole[4])


def test_remax_survives_far_larger_rewards_beside_it() -> None:
    rewards, loss_mask = Ragged.of([[1e6] * 3, [0.25, 0.5]]), Ragged.of([[True] * 3, [True, True]])
    assert remax(rewards, torch.zeros(2), loss_mask)[1].tolist() == pytest.approx([0.75, 0.5], rel=1e-6)


def test_of_no_rows() -> None:
    assert remax(Ragged.of([], torch.float32), torch.zeros(0), Ragged.of([], torch.bool)).tolist() == []


def test_a_running_baseline_is_of_the_iterations_before() -> None:
    mask = Ragged.of([[False, True], [False, True, True], [True]], torch.bool)
    ctx = Context("advantages", 0, 0)
    first = running(ctx, torch.tensor([1.0, 0.0, 1.0]), ["a", "a", "b"], mask, decay=0.5)
    assert first.values.tolist() == pytest.approx([0, 1 / 3, 0, -2 / 3, -2 / 3, 1 / 3])
    assert [*ctx.state.values()] == pytest.approx([2 / 3, 0.5, 1.0])
    again = running(ctx, torch.tensor([1.0, 0.0, 0.0]), ["a", "new", "b"], mask, decay=0.5)
    assert again.values.tolist() == pytest.approx([0, 0.5, 0, -2 / 3, -2 / 3, -1.0])
    assert [*ctx.state.values()] == pytest.approx([0.5, 0.75, 0.5, 0.0])
    assert ctx.metrics["advantages/baseline"].value == pytest.approx((3 * 2 / 3 + 0.5 + 2 / 3 + 1) / 6)
