"""Advantage estimators against slow references written from the formulas."""

import math
import statistics

import pytest
import torch

from rlgraph.nodes.advantage import gae, grpo, whitened
from rlgraph.nodes.ragged import Ragged

MASK = [[False, True, True, False, True], [False, True], [False, False], [True, False, True], []]


def mask() -> Ragged:
    return Ragged.of(MASK, torch.bool)


def drawn(seed: int) -> Ragged:
    return mask().like(torch.randn(12, generator=torch.Generator().manual_seed(seed)))


def slow_gae(
    rewards: list[float], values: list[float], written: list[bool], gamma: float, lam: float
) -> list:
    advantages, next_value, carried = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if written[t]:
            carried = rewards[t] + gamma * next_value - values[t] + gamma * lam * carried
            advantages[t], next_value = carried, values[t]
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0), (0.0, 0.9)])
def test_gae_is_its_formula(gamma: float, lam: float) -> None:
    rewards, values = drawn(0), drawn(1)
    out = gae(rewards, values, mask(), gamma=gamma, lam=lam, whiten=False)
    for row, written in enumerate(MASK):
        expected = slow_gae(rewards[row].tolist(), values[row].tolist(), written, gamma, lam)
        assert out.advantages[row].tolist() == pytest.approx(expected, abs=1e-6)
        targets = [
            a + v if w else 0.0 for a, v, w in zip(expected, values[row].tolist(), written, strict=True)
        ]
        assert out.returns[row].tolist() == pytest.approx(targets, abs=1e-6)


def test_gae_by_hand() -> None:
    # prompt, token, tool, token; delta = [0 + 0.5 * 2 - 1, 4 - 2] = [0, 2]; A = [0 + 0.5 * 0.5 * 2, 2]
    out = gae(
        Ragged.of([[9.0, 0.0, 9.0, 4.0]]),
        Ragged.of([[9.0, 1.0, 9.0, 2.0]]),
        Ragged.of([[False, True, False, True]]),
        gamma=0.5,
        lam=0.5,
        whiten=False,
    )
    assert out.advantages.tolist() == [[0.0, 0.5, 0.0, 2.0]]
    assert out.returns.tolist() == [[0.0, 1.5, 0.0, 4.0]]


def test_gae_whitens_advantages_and_not_returns() -> None:
    raw, white = (gae(drawn(0), drawn(1), mask(), whiten=w) for w in (False, True))
    assert white.returns.values.equal(raw.returns.values)
    numbers = raw.advantages.values[mask().values].tolist()
    mean, deviation = statistics.mean(numbers), math.sqrt(statistics.variance(numbers) + 1e-8)
    expected = [(number - mean) / deviation for number in numbers]
    assert white.advantages.values[mask().values].tolist() == pytest.approx(expected, abs=1e-5)
    assert white.advantages.values[~mask().values].eq(0).all()


def test_gae_does_not_depend_on_the_order_of_rows() -> None:
    order = torch.tensor([3, 4, 0, 2, 1])
    out = gae(drawn(0), drawn(1), mask())
    moved = gae(drawn(0).take(order), drawn(1).take(order), mask().take(order))
    torch.testing.assert_close(moved.advantages.values, out.advantages.take(order).values)
    torch.testing.assert_close(moved.returns.values, out.returns.take(order).values)


def test_gae_of_nothing() -> None:
    nothing = Ragged.of([[False, False], []], torch.bool)
    zeros = nothing.like(torch.ones(2))
    out = gae(zeros, zeros, nothing)
    assert out.advantages.tolist() == out.returns.tolist() == [[0.0, 0.0], []]


def test_whitening_a_single_token_is_zero() -> None:
    assert whitened(Ragged.of([[5.0, 7.0]]), Ragged.of([[False, True]])).tolist() == [[0.0, 0.0]]


def slow_grpo(rewards: list[float], group: list[int], scale: bool) -> list[float]:
    out = []
    for score, own in zip(rewards, group, strict=True):
        peers = [r for r, g in zip(rewards, group, strict=True) if g == own]
        mean, deviation = (statistics.mean(peers), statistics.stdev(peers)) if len(peers) > 1 else (0.0, 1.0)
        out.append((score - mean) / (deviation + 1e-6) if scale else score - mean)
    return out


@pytest.mark.parametrize("scale", [True, False])
def test_grpo_is_its_formula(scale: bool) -> None:
    rewards, group = [1.0, 0.0, 0.5, 0.25, 3.0], [7, 2, 7, 2, 5]
    out = grpo(torch.tensor(rewards), torch.tensor(group), mask(), scale=scale)
    for row, expected in enumerate(slow_grpo(rewards, group, scale)):
        assert out[row].tolist() == pytest.approx([expected if w else 0.0 for w in MASK[row]], rel=1e-5)


def test_grpo_by_hand() -> None:
    everything = Ragged.of([[True]] * 4)
    out = grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0]), everything)
    assert out.values.tolist() == pytest.approx([math.sqrt(3) / 2 * s for s in (1, -1, -1, 1)], rel=1e-5)


def test_grpo_of_equal_rewards_is_zero() -> None:
    out = grpo(torch.full((5,), 0.1), torch.zeros(5, dtype=torch.int64), mask())
    assert out.values.eq(0).all()


def test_grpo_does_not_depend_on_the_order_of_rows() -> None:
    order = torch.tensor([3, 4, 0, 2, 1])
    rewards, group = torch.rand(5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 0, 1, 1])
    out, moved = grpo(rewards, group, mask()), grpo(rewards[order], group[order], mask().take(order))
    torch.testing.assert_close(moved.values, out.take(order).values)
