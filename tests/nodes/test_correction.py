"""Rollout corrections and the decoupled loss, against slow references written from the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recorded import means
from rlgraph.nodes.loss.policy import decoupled_ppo, decoupled_ppo_approx, ppo_clip
from rlgraph.nodes.select.correction import mis, reject, tis
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Context, Loss, Totals

# one row has tool output in its middle, one nothing in its loss mask, one no tokens
MASK = [[False, True, True, False, True], [False, True, True], [False, False], [], [True] * 4]
LIMIT = 20.0

Rows = list[list[float]]
Correction = Callable[..., Ragged]


def columns(seed: int = 0, apart: float = 0.8) -> tuple[Ragged, Ragged, Ragged]:
    """old_logprobs, rollout_logprobs and loss_mask; log-probs are 0 outside it, as engines write them."""
    draw, mask = torch.Generator().manual_seed(seed), Ragged.of(MASK, torch.bool)
    old = -torch.rand(len(mask.values), generator=draw) * 3
    rollout = old + apart * torch.randn(len(mask.values), generator=draw)
    return mask.like(old * mask.values), mask.like(rollout * mask.values), mask


def context() -> Context:
    return Context("rollout_weights", 0, 0)


def slow_ratios(old: list[float], rollout: list[float], mask: list[bool], level: str) -> list[float]:
    differences = [o - r for o, r in zip(old, rollout, strict=True)]
    if level == "sequence":
        total = sum(d for d, w in zip(differences, mask, strict=True) if w)
        differences = [total] * len(mask)
    return [math.exp(max(-LIMIT, min(LIMIT, d))) for d in differences]


def slow_tis(old: list[float], rollout: list[float], mask: list[bool], level: str) -> list[float]:
    ratios = slow_ratios(old, rollout, mask, level)
    return [min(rho, 1.5) if w else 0.0 for rho, w in zip(ratios, mask, strict=True)]


def slow_mis(old: list[float], rollout: list[float], mask: list[bool], level: str) -> list[float]:
    ratios = slow_ratios(old, rollout, mask, level)
    return [rho if w and 0.6 <= rho <= 1.5 else 0.0 for rho, w in zip(ratios, mask, strict=True)]


def slow_reject(old: list[float], rollout: list[float], mask: list[bool], kind: str) -> list[float]:
    found = []
    for o, r, w in zip(old, rollout, mask, strict=True):
        d = r - o
        estimates = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}
        found += [estimates[kind]] if w else []
    kept = not found or abs(sum(found) / len(found)) <= 0.2
    return [float(w and kept) for w in mask]


CASES: list[tuple[Correction, dict[str, Any], Callable[..., list[float]], str]] = [
    (tis, {"cap": 1.5, "level": level}, slow_tis, level) for level in ("token", "sequence")
]
CASES += [
    (mis, {"low": 0.6, "high": 1.5, "level": level}, slow_mis, level) for level in ("token", "sequence")
]
CASES += [
    (reject, {"threshold": 0.2, "kl": kind, "weights": None}, slow_reject, kind)
    for kind in ("k1", "k2", "k3")
]
each = pytest.mark.parametrize(("correct", "attributes", "slow", "how"), CASES)


@each
@pytest.mark.parametrize("apart", [0.0, 0.3, 0.8, 30.0])
def test_a_correction_is_its_formula(
    correct: Correction, attributes: dict[str, Any], slow: Callable[..., list[float]], how: str, apart: float
) -> None:
    old, rollout, mask = columns(apart=apart)
    out = correct(context(), old, rollout, mask, **attributes)
    expected = [
        slow(*row, how) for row in zip(old.tolist(), rollout.tolist(), MASK, strict=True)
    ]  # row by row, as nothing else may count
    for row, numbers in enumerate(expected):
        assert out[row].tolist() == pytest.approx(numbers, rel=1e-5)
    assert out.values.dtype == torch.float32


@each
def test_it_records_the_mean_weight_and_the_share_that_is_cut(
    correct: Correction, attributes: dict[str, Any], slow: Callable[..., list[float]], how: str
) -> None:
    ctx, (old, rollout, mask) = context(), columns()
    out = correct(ctx, old, rollout, mask, **attributes)
    written = int(mask.values.sum())
    assert means(ctx)["rollout_weights/weight"] == pytest.approx((out.values.sum().item(), written))
    cut, count = means(ctx)["rollout_weights/cut"]
    capped = out.values[mask.values] == (1.5 if correct is tis else 0.0)
    assert (cut, count) == (capped.sum().item(), written)


@each
def test_it_does_not_depend_on_the_order_of_rows_nor_on_who_is_beside_them(
    correct: Correction, attributes: dict[str, Any], slow: Callable[..., list[float]], how: str
) -> None:
    old, rollout, mask = columns()
    whole = correct(context(), old, rollout, mask, **attributes)
    for rows in ([3, 4, 1, 0, 2], [1], [0, 4]):
        order = torch.tensor(rows)
        part = correct(context(), *(c.take(order) for c in (old, rollout, mask)), **attributes)
        torch.testing.assert_close(part.values, whole.take(order).values)


@each
def test_engines_that_agree_leave_everything_as_it_is(
    correct: Correction, attributes: dict[str, Any], slow: Callable[..., list[float]], how: str
) -> None:
    ctx, (old, _, mask) = context(), columns()
    assert correct(ctx, old, old, mask, **attributes).values.equal(mask.values.float())
    assert means(ctx)["rollout_weights/cut"][0] == 0


@each
def test_of_no_rows_and_of_no_tokens(
    correct: Correction, attributes: dict[str, Any], slow: Callable[..., list[float]], how: str
) -> None:
    nothing = Ragged.of([[False, False], []], torch.bool)
    zeros = nothing.like(torch.zeros(2))
    assert correct(context(), zeros, zeros, nothing, **attributes).tolist() == [[0.0, 0.0], []]
    none, mask = Ragged.of([], torch.float32), Ragged.of([], torch.bool)
    assert correct(context(), none, none, mask, **attributes).tolist() == []


OLD = Ragged.of([[0.0, -1.0, -1.0], [-1.0, -1.0]])
ROLLOUT = Ragged.of([[0.0, -1.0 - math.log(4), -1.0], [-1.0 + math.log(4), -1.0]])
WRITTEN = Ragged.of([[False, True, True], [True, True]])


@pytest.mark.parametrize(
    ("correct", "attributes", "expected"),
    [
        # ratios of tokens: 4 and 1, then 1/4 and 1; of sequences 4 and 1/4
        (tis, {}, [0, 2, 1, 0.25, 1]),
        (tis, {"level": "sequence"}, [0, 2, 2, 0.25, 0.25]),
        (tis, {"cap": 10.0}, [0, 4, 1, 0.25, 1]),
        (mis, {}, [0, 0, 1, 0, 1]),
        (mis, {"level": "sequence", "low": 0.0, "high": 5.0}, [0, 4, 4, 0.25, 0.25]),
        # mean k1 is -log(4)/2 and log(4)/2; k3 is (3 - log 4)/2 = 0.81 and (log 4 - 3/4)/2 = 0.32
        (reject, {"weights": None, "threshold": 0.5, "kl": "k1"}, [0, 0, 0, 0, 0]),
        (reject, {"weights": None, "threshold": 0.5}, [0, 0, 0, 1, 1]),
        (reject, {"weights": None, "threshold": 0.2}, [0, 0, 0, 0, 0]),
    ],
)
def test_by_hand(correct: Correction, attributes: dict[str, Any], expected: list[float]) -> None:
    out = correct(context(), OLD, ROLLOUT, WRITTEN, **attributes)
    assert out.values.tolist() == pytest.approx(expected)


def test_a_sequence_that_is_kept_keeps_the_weights_that_are_given() -> None:
    weights = tis(context(), OLD, ROLLOUT, WRITTEN)
    out = reject(context(), OLD, ROLLOUT, WRITTEN, weights, threshold=0.5)
    assert out.values.tolist() == pytest.approx([0, 0, 0, 0.25, 1])


# ---- the decoupled loss ----


def random_columns(count: int, seed: int = 0) -> list[Ragged]:
    draw = torch.Generator().manual_seed(seed)
    rows = Ragged.of([[0.0] * 5, [], [0.0] * 3], torch.float64)
    return [rows.like(torch.randn(8, generator=draw, dtype=torch.float64)) for _ in range(count)]


def slow_decoupled(lp: float, old: float, behaviour: float, a: float, cap: float) -> float:
    rho = math.exp(max(-LIMIT, min(LIMIT, lp - old)))
    weight = min(cap, math.exp(max(-LIMIT, min(LIMIT, old - behaviour))))
    return weight * max(-a * rho, -a * max(0.8, min(1.3, rho)))


@pytest.mark.parametrize("cap", [None, 1.2])
def test_decoupled_ppo_is_its_formula(cap: float | None) -> None:
    given = random_columns(4, seed=1)
    out = decoupled_ppo(*given, clip=0.2, clip_high=0.3, cap=cap)
    expected = [
        slow_decoupled(*numbers, cap or math.inf)
        for numbers in zip(*(column.values.tolist() for column in given), strict=True)
    ]
    assert out.values.tolist() == pytest.approx(expected)
    assert out.offsets.equal(given[0].offsets)


def test_decoupled_ppo_by_hand() -> None:
    # pi / pi_old = 2, capped at 1.2 where it pays; pi_old / pi_rollout = 3 weighs both
    lp, old, rollout = ([[math.log(x)] * 2] for x in (6.0, 3.0, 1.0))
    advantages = Ragged.of([[1.0, -1.0]])
    out = decoupled_ppo(*(Ragged.of(c) for c in (lp, old, rollout)), advantages, clip=0.2)
    assert out.values.tolist() == pytest.approx([-3.6, 6.0])
    # and no more than 1.5 where it does not
    out = decoupled_ppo(*(Ragged.of(c) for c in (lp, old, rollout)), advantages, clip=0.2, dual_clip=1.5)
    assert out.values.tolist() == pytest.approx([-3.6, 4.5])


def test_decoupled_ppo_of_rows_that_the_policy_itself_sampled_is_ppo() -> None:
    lp, old, advantages = random_columns(3, seed=2)
    torch.testing.assert_close(
        decoupled_ppo(lp, old, old, advantages).values, ppo_clip(lp, old, advantages).values
    )


def test_decoupled_ppo_gradient_by_finite_differences() -> None:
    lp, old, rollout, advantages = random_columns(4, seed=3)
    values = lp.values.clone().requires_grad_()

    def total(flat: torch.Tensor) -> torch.Tensor:
        return decoupled_ppo(lp.like(flat), old, rollout, advantages, cap=2.0).values

    assert torch.autograd.gradcheck(total, values, eps=1e-7, atol=1e-5)


def test_decoupled_ppo_survives_far_ratios() -> None:
    far = Ragged.of([[1000.0, -1000.0]], torch.float64)
    zero, advantages = far.like(torch.zeros(2, dtype=torch.float64)), Ragged.of([[-1.0, 1.0]], torch.float64)
    for given in ((far, zero, zero), (zero, far, zero), (zero, zero, far)):
        assert decoupled_ppo(*given, advantages).values.isfinite().all()


@pytest.mark.parametrize("staleness", [1.0, 4.0])
def test_an_approximate_proximal_policy_lies_between_and_takes_no_gradient(staleness: float) -> None:
    lp, behaviour, advantages = random_columns(3, seed=4)
    values = lp.values.clone().requires_grad_()
    out = decoupled_ppo_approx(lp.like(values), behaviour, advantages, staleness=staleness, cap=2.0)
    between = [
        math.log(math.exp(old) ** (1 / (staleness + 1)) * math.exp(now) ** (staleness / (staleness + 1)))
        for old, now in zip(behaviour.values.tolist(), lp.values.tolist(), strict=True)
    ]
    whole = decoupled_ppo(lp.like(values), lp.like(torch.tensor(between)), behaviour, advantages, cap=2.0)
    torch.testing.assert_close(out.values, whole.values)
    (got,), (wanted,) = (torch.autograd.grad(each.values.sum(), values) for each in (out, whole))
    torch.testing.assert_close(got, wanted)


# ---- weights in the objective of an update ----


def objective_of(lp: torch.Tensor, weights: Ragged, **given: Ragged) -> torch.Tensor:
    mask = weights.like(torch.ones(len(weights.values), dtype=torch.bool))
    batch = {"loss_mask": mask, "logprobs": weights.like(lp), "rollout_weights": weights, **given}
    loss = Loss(ppo_clip, {"clip": 0.2}, {})
    objective = policy_objective(loss, "seq-mean-token-mean", 0.0, "k3", 0.0)
    return objective(batch, Totals(8, 3))[0]


def test_gradient_of_a_weighed_objective_by_finite_differences() -> None:
    lp, old, advantages, weights = random_columns(4, seed=4)
    values = lp.values.clone().requires_grad_()

    def total(flat: torch.Tensor) -> torch.Tensor:
        return objective_of(flat, weights, old_logprobs=old, advantages=advantages)

    assert torch.autograd.gradcheck(total, values, eps=1e-7, atol=1e-5)


def test_tis_and_a_ratio_are_the_decoupled_loss() -> None:
    old, rollout, mask = columns()
    draw = torch.Generator().manual_seed(5)
    lp, advantages = (mask.like(torch.randn(len(mask.values), generator=draw)) for _ in range(2))
    weights = tis(context(), old, rollout, mask, cap=2.0)
    weighed = weights.values * ppo_clip(lp, old, advantages).values
    decoupled = decoupled_ppo(lp, old, rollout, advantages, cap=2.0).values
    torch.testing.assert_close(weighed[mask.values], decoupled[mask.values])
