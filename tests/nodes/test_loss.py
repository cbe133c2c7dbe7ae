"""Losses and KL estimators against formulas written out, and their gradients by finite differences."""

import math
from collections.abc import Callable

import pytest
import torch

from rlgraph.nodes.loss.policy import aggregate, cispo, kl, ppo_clip, reinforce, sapo, sft
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals


def column(*rows: list[float]) -> Ragged:
    return Ragged.of(rows, torch.float64)


def random_columns(count: int, seed: int = 0) -> list[Ragged]:
    draw = torch.Generator().manual_seed(seed)
    rows = Ragged.of([[0.0] * 5, [], [0.0] * 3], torch.float64)
    return [rows.like(torch.randn(8, generator=draw, dtype=torch.float64)) for _ in range(count)]


def differences(function: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """The gradient of a scalar function by central differences."""
    steps = torch.eye(len(start), dtype=start.dtype) * 1e-6
    return torch.stack([(function(start + step) - function(start - step)) / 2e-6 for step in steps])


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


def test_cispo_is_its_formula() -> None:
    lp, old, advantages = random_columns(3, seed=3)
    expected = [
        -max(0.7, min(1.2, math.exp(new - before))) * a * new
        for new, before, a in zip(*(c.values.tolist() for c in (lp, old, advantages)), strict=True)
    ]
    losses = cispo(lp, old, advantages, clip=0.3, clip_high=0.2)
    assert losses.values.tolist() == pytest.approx(expected)
    assert losses.offsets.equal(lp.offsets)


def test_cispo_by_hand() -> None:
    # ratios 2, 0.5 and 1: the first counts 1.2, the second keeps its weight as nothing bounds it below
    lp, old = column([math.log(2), math.log(0.5), -1.0]), column([0.0, 0.0, -1.0])
    losses = cispo(lp, old, column([1.0, -1.0, 2.0]))
    assert losses.values.tolist() == pytest.approx([-1.2 * math.log(2), 0.5 * math.log(0.5), 2.0])


def test_cispo_gradient_is_that_of_weights_held_fixed() -> None:
    lp, old, advantages = random_columns(3, seed=4)
    weights = (lp.values - old.values).exp().clamp(0, 1.2)
    values = lp.values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cispo(lp.like(values), old, advantages).values.sum(), values)
    fixed = differences(lambda flat: -(weights * advantages.values * flat).sum(), lp.values)
    torch.testing.assert_close(gradient, fixed, atol=1e-6, rtol=1e-6)
    assert gradient.ne(0).all()  # clipped or not, every token has one


def slow_sapo(lp: float, old: float, a: float, tau: float, tau_negative: float) -> float:
    rho, steepness = math.exp(max(-20.0, min(20.0, lp - old))), tau if a > 0 else tau_negative
    return -a * 4 / steepness / (1 + math.exp(-steepness * (rho - 1)))


def test_sapo_is_its_formula() -> None:
    lp, old, advantages = random_columns(3, seed=5)
    losses = sapo(lp, old, advantages, tau=0.8, tau_negative=1.5)
    expected = [
        slow_sapo(*numbers, 0.8, 1.5)
        for numbers in zip(*(c.values.tolist() for c in (lp, old, advantages)), strict=True)
    ]
    assert losses.values.tolist() == pytest.approx(expected)
    assert losses.offsets.equal(lp.offsets)


def test_sapo_by_hand() -> None:
    # at ratio 1 the gate is 1/2 and its slope t/4: value 2 / t, gradient that of the ratio
    values = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    losses = sapo(column([0.0, 0.0]).like(values), column([0.0, 0.0]), column([1.0, -1.0]))
    assert losses.values.tolist() == pytest.approx([-2.0, 2.0 / 1.05])
    (gradient,) = torch.autograd.grad(losses.values.sum(), values)
    assert gradient.tolist() == pytest.approx([-1.0, 1.0])


def test_sapo_gradient_by_finite_differences() -> None:
    lp, old, advantages = random_columns(3, seed=6)
    values = lp.values.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda flat: sapo(lp.like(flat), old, advantages).values, values)


@pytest.mark.parametrize("loss", [cispo, sapo])
def test_a_far_ratio_is_survived(loss: Callable[..., Ragged]) -> None:
    values = torch.tensor([1000.0, -1000.0], dtype=torch.float64, requires_grad=True)
    losses = loss(column([0.0, 0.0]).like(values), column([0.0, 0.0]), column([-1.0, 1.0])).values
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert losses.isfinite().all() and gradient.isfinite().all()


def test_norm_is_a_constant_divisor_of_the_sum() -> None:
    losses, mask = column([1.0, 2.0], [3.0]), Ragged.of([[True, True], [True]], torch.bool)
    found = aggregate(losses, mask, Totals(3, 2), "seq-mean-token-sum-norm", norm=8)
    assert found.item() == pytest.approx(6 / 2 / 8)


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
