"""Advantage estimators against slow references written from the formulas."""

import math
import statistics

import pytest
import torch

from rlgraph.nodes.advantage.gae import gae, reinforce_pp, whitened
from rlgraph.nodes.support.ragged import Ragged

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


def slow_reinforce_pp(rewards: list[list[float]], gamma: float) -> list[list[float]]:
    returns = [[0.0] * len(row) for row in rewards]
    for row, written in enumerate(MASK):
        carried = 0.0
        for t in reversed(range(len(written))):
            if written[t]:
                carried = returns[row][t] = rewards[row][t] + gamma * carried
    pairs = [
        (g, w) for row, written in zip(returns, MASK, strict=True) for g, w in zip(row, written, strict=True)
    ]
    kept = [number for number, written in pairs if written]
    mean, deviation = statistics.mean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    return [
        [(g - mean) / deviation if w else 0.0 for g, w in zip(row, written, strict=True)]
        for row, written in zip(returns, MASK, strict=True)
    ]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_pp_is_its_formula(gamma: float) -> None:
    out = reinforce_pp(drawn(0), mask(), gamma=gamma)
    for row, expected in enumerate(slow_reinforce_pp(drawn(0).tolist(), gamma)):
        assert out[row].tolist() == pytest.approx(expected, abs=1e-5)


def test_reinforce_pp_by_hand() -> None:
    # token, tool, token: the return of the last passes the tool output undiscounted; G = [0 + 0.5 * 4, 4]
    out = reinforce_pp(Ragged.of([[0.0, 9.0, 4.0]]), Ragged.of([[True, False, True]]), gamma=0.5)
    assert out.tolist() == [pytest.approx([-math.sqrt(0.5), 0.0, math.sqrt(0.5)])]


def test_reinforce_pp_does_not_depend_on_the_order_of_rows() -> None:
    order = torch.tensor([3, 4, 0, 2, 1])
    out, moved = reinforce_pp(drawn(0), mask()), reinforce_pp(drawn(0).take(order), mask().take(order))
    torch.testing.assert_close(moved.values, out.take(order).values)


def test_reinforce_pp_of_nothing() -> None:
    nothing = Ragged.of([[False, False], []], torch.bool)
    assert reinforce_pp(nothing.like(torch.ones(2)), nothing).tolist() == [[0.0, 0.0], []]
