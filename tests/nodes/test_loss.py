"""Losses and KL estimators against formulas written out, and their gradients by finite differences."""

import math

import pytest
import torch

from rlgraph.engines import Totals
from rlgraph.nodes.loss import aggregate, kl, ppo_clip, reinforce, sft
from rlgraph.nodes.ragged import Ragged


def column(*rows: list[float]) -> Ragged:
    return Ragged.of(rows, torch.float64)


def random_columns(count: int, seed: int = 0) -> list[Ragged]:
    draw = torch.Generator().manual_seed(seed)
    rows = Ragged.of([[0.0] * 5, [], [0.0] * 3], torch.float64)
    return [rows.like(torch.randn(8, generator=draw, dtype=torch.float64)) for _ in range(count)]


def slow_ppo(lp: float, old: float, a: float, low: float, high: float, dual: float | None) -> float:
    rho = math.exp(max(-20.0, min(20.0, lp - old)))
    loss = max(-a * rho, -a * max(1 - low, min(1 + high, rho)))
    return min(loss, -a * dual) if dual is not None and a < 0 else loss


@pytest.mark.parametrize(("clip_high", "dual_clip"), [(None, None), (0.3, None), (None, 1.5)])
def test_ppo_clip_is_its_formula(clip_high: float | None, dual_clip: float | None) -> None:
    lp, old, advantages = random_columns(3)
    losses = ppo_clip(lp, old, advantages, clip=0.2, clip_high=clip_high, dual_clip=dual_clip)
    expected = [
        slow_ppo(*numbers, 0.2, clip_high or 0.2, dual_clip)
        for numbers in zip(*(c.values.tolist() for c in (lp, old, advantages)), strict=True)
    ]
    assert losses.values.tolist() == pytest.approx(expected)
    assert losses.offsets.equal(lp.offsets)


def test_ppo_clip_by_hand() -> None:
    # ratio 2: capped at 1.2 where it pays, not where it costs; dual clip caps the cost at 3 A
    lp, old = column([math.log(2)] * 2, [math.log(5)]), column([0.0, 0.0], [0.0])
    losses = ppo_clip(lp, old, column([1.0, -1.0], [-1.0]), clip=0.2, dual_clip=3.0)
    assert losses.values.tolist() == pytest.approx([-1.2, 2.0, 3.0])


def test_ppo_clip_survives_a_far_ratio() -> None:
    losses = ppo_clip(column([1000.0, -1000.0]), column([0.0, 0.0]), column([-1.0, -1.0]))
    assert losses.values.tolist() == pytest.approx([math.exp(20), 0.8])


def test_ppo_clip_gradient_by_finite_differences() -> None:
    lp, old, advantages = random_columns(3, seed=1)
    values = lp.values.clone().requires_grad_()

    def total(flat: torch.Tensor) -> torch.Tensor:
        return ppo_clip(lp.like(flat), old, advantages, clip=0.2, dual_clip=3.0).values

    assert torch.autograd.gradcheck(total, values, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_gradient_by_finite_differences(kind: str) -> None:
    lp, ref = random_columns(2, seed=2)
    assert torch.autograd.gradcheck(
        lambda flat: kl(flat, ref.values, kind), lp.values.clone().requires_grad_()
    )


def test_kl_by_hand() -> None:
    lp, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0])
    assert kl(lp, ref, "k1").tolist() == [1.0, -1.0]
    assert kl(lp, ref, "k2").tolist() == [0.5, 0.5]
    assert kl(lp, ref, "abs").tolist() == [1.0, 1.0]
    assert kl(lp, ref, "k3").tolist() == pytest.approx([math.exp(-1), math.e - 2])
    assert kl(torch.tensor([-1000.0]), torch.tensor([0.0]), "k3").tolist() == [10.0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_estimators_average_to_the_kl(kind: str) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    exact = (p * (p / q).log()).sum()
    assert (p * kl(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact.item(), rel=1e-5)


def test_sft_and_reinforce_by_hand() -> None:
    lp = column([-1.0, -2.0])
    assert sft(lp).tolist() == [[1.0, 2.0]]
    assert reinforce(lp, column([3.0, -1.0])).tolist() == [[3.0, -2.0]]


HOWS = {
    "token-mean": 21 / 4,
    "token-sum": 21,
    "seq-mean-token-sum": 21 / 3,
    "seq-mean-token-mean": (2 + 15) / 3,
}


@pytest.mark.parametrize("how", HOWS)
def test_aggregate_by_hand(how: str) -> None:
    losses = column([99.0, 1.0, 2.0, 3.0], [15.0, 99.0], [99.0])
    mask = Ragged.of([[False, True, True, True], [True, False], [False]], torch.bool)
    assert aggregate(losses, mask, Totals(4, 3), how).item() == pytest.approx(HOWS[how])


@pytest.mark.parametrize("how", HOWS)
def test_micro_batches_add_up_to_the_batch(how: str) -> None:
    losses, noise = random_columns(2)
    mask = losses.like(noise.values > 0)
    totals = Totals(int(mask.values.sum()), 3)
    parts = [
        aggregate(losses.take(torch.tensor(rows)), mask.take(torch.tensor(rows)), totals, how)
        for rows in ([2], [0, 1])
    ]
    assert sum(parts).item() == pytest.approx(aggregate(losses, mask, totals, how).item())


@pytest.mark.parametrize("how", HOWS)
def test_aggregate_of_nothing_is_zero(how: str) -> None:
    nothing = Ragged.of([[False, False], []], torch.bool)
    assert aggregate(column([1.0, math.inf], []), nothing, Totals(0, 0), how).item() == 0
