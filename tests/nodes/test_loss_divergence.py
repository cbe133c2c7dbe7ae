"""DPPO: its trust regions against formulas written out, and its gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlgraph.nodes.loss.divergence import binary_kl, dppo_kl, dppo_tv
from rlgraph.nodes.support.ragged import Ragged

Loss = Callable[..., Ragged]
each = pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])


def column(*values: float) -> Ragged:
    return Ragged.of([values], torch.float64)


def case(seed: int = 0) -> tuple[Ragged, Ragged, Ragged]:
    draw = torch.Generator().manual_seed(seed)
    rows = Ragged.of([[0.0] * 13, [], [0.0] * 7], torch.float64)
    lp, old, advantages = (torch.randn(20, generator=draw, dtype=torch.float64) for _ in range(3))
    return rows.like(-lp.abs() / 2), rows.like(-old.abs() / 2), rows.like(advantages)


def slow_tv(lp: float, old: float, a: float, limit: float, high: float, cap: float) -> float:
    gained = math.exp(lp) - math.exp(old)
    inside = gained <= high if a > 0 else gained >= -limit
    return -a * min(math.exp(lp - old), cap) * lp if inside else 0.0


def slow_kl(lp: float, old: float, a: float, limit: float, high: float, cap: float) -> float:
    p, q = math.exp(old), math.exp(lp)
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    inside = (divergence <= high or q <= p) if a > 0 else (divergence <= limit or q >= p)
    return -a * min(math.exp(lp - old), cap) * lp if inside else 0.0


SLOW = {dppo_tv: slow_tv, dppo_kl: slow_kl}


@each
@pytest.mark.parametrize(("limit", "high", "cap"), [(0.1, 0.1, 20.0), (0.02, 0.3, 20.0), (1.0, 1.0, 1.1)])
def test_a_loss_is_its_formula(loss: Loss, limit: float, high: float, cap: float) -> None:
    lp, old, advantages = case()
    found = loss(lp, old, advantages, limit=limit, limit_high=high, cap=cap)
    numbers = zip(*(c.values.tolist() for c in (lp, old, advantages)), strict=True)
    expected = [SLOW[loss](*three, limit, high, cap) for three in numbers]
    assert found.values.tolist() == pytest.approx(expected, rel=1e-6)
    assert found.offsets.equal(lp.offsets)
    assert limit == 1.0 or 0.0 in expected  # the case has tokens outside


def test_dppo_tv_by_hand() -> None:
    # from 0.001 to 0.1, a ratio of 100: 0.099 more is inside, and the weight is capped; from 0.9 to 0.6,
    # a ratio of 2/3: 0.3 less is outside where the advantage pushes it down, and inside where it pulls it up
    now, old = (0.1, 0.6, 0.6), (0.001, 0.9, 0.9)
    lp, before = column(*map(math.log, now)), column(*map(math.log, old))
    losses = dppo_tv(lp, before, column(1.0, -1.0, 1.0), limit=0.2, cap=20.0)
    expected = [-20 * math.log(0.1), 0.0, -2 / 3 * math.log(0.6)]
    assert losses.values.tolist() == pytest.approx(expected)


def test_dppo_kl_by_hand() -> None:
    # 0.5 -> 0.8: 0.5 ln(25/16) = 0.223 nats
    lp, old = column(*[math.log(0.8)] * 2), column(*[math.log(0.5)] * 2)
    assert binary_kl(old.values, lp.values).tolist() == pytest.approx([0.5 * math.log(25 / 16)] * 2)
    advantages = column(1.0, -1.0)
    assert dppo_kl(lp, old, advantages, limit=0.2).values.tolist() == pytest.approx(
        [0.0, 1.6 * math.log(0.8)]
    )
    wide = dppo_kl(lp, old, advantages, limit=0.2, limit_high=0.3).values[0]
    assert wide.item() == pytest.approx(-1.6 * math.log(0.8))


@each
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(loss: Loss) -> None:
    _, old, advantages = case(1)
    values = old.values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(old.like(values), old, advantages).values.sum(), values)
    torch.testing.assert_close(gradient, -advantages.values)


@each
def test_the_gradient_is_that_of_weights_held_fixed(loss: Loss) -> None:
    lp, old, advantages = case(2)
    values = lp.values.clone().requires_grad_()
    losses = loss(lp.like(values), old, advantages).values
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    weights = (losses / lp.values).detach()  # -A min(rho, cap) inside, 0 outside
    steps = torch.eye(20, dtype=torch.float64) * 1e-6
    ahead, behind = ((weights * (lp.values + sign * steps)).sum(1) for sign in (1, -1))
    torch.testing.assert_close(gradient, (ahead - behind) / 2e-6, atol=1e-6, rtol=1e-6)


@each
def test_rows_are_apart(loss: Loss) -> None:
    columns = case(3)
    whole = loss(*columns)
    order = torch.tensor([2, 0, 1])
    moved = loss(*(column.take(order) for column in columns))
    assert moved.tolist() == whole.take(order).tolist()


@each
def test_certain_and_far_tokens_are_survived(loss: Loss) -> None:
    lp, old = Ragged.of([[0.0, 0.0, -1e3, -1e3, 0.0]]), Ragged.of([[0.0, -1e3, 0.0, -1e3, -1e-7]])
    values = lp.values.clone().requires_grad_()
    for sign in (1.0, -1.0):
        losses = loss(lp.like(values), old, lp.like(torch.full((5,), sign))).values
        (gradient,) = torch.autograd.grad(losses.sum(), values)
        assert losses.isfinite().all() and gradient.isfinite().all()
