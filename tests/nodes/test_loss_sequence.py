"""Losses of whole sequences against formulas written out, and their gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlgraph.nodes.loss.policy import aggregate
from rlgraph.nodes.loss.ratio import sequence_ratio
from rlgraph.nodes.loss.sequence import geo_mean, gspo, vespo
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals

# a tool's output between tokens of the policy, an empty row, one that the policy wrote nothing of
MASK = [[False, True, True, False, True], [], [False, False], [True, True, True], [False, True]]
ROWS = len(MASK)
both = pytest.mark.parametrize("loss", [gspo, geo_mean])


def mask() -> Ragged:
    return Ragged.of(MASK, torch.bool)


def columns(seed: int, spread: float = 0.5) -> tuple[Ragged, Ragged, Ragged]:
    """Log-probs now and before, and one advantage a row."""
    draw = torch.Generator().manual_seed(seed)
    lp, change = (torch.randn(12, generator=draw, dtype=torch.float64) for _ in range(2))
    advantages = mask().spread(torch.randn(ROWS, generator=draw, dtype=torch.float64))
    return mask().like(lp), mask().like(lp - spread * change), advantages


def total(
    loss: Callable[..., Ragged], lp: Ragged, old: Ragged, advantages: Ragged, **clips: float
) -> torch.Tensor:
    losses = loss(lp, old, advantages, mask(), **clips)
    return aggregate(losses, mask(), Totals(int(mask().values.sum()), ROWS), "seq-mean-token-mean")


def written(column: Ragged, row: int) -> list[float]:
    return [number for number, w in zip(column[row].tolist(), MASK[row], strict=True) if w]


def slow_gspo(lp: Ragged, old: Ragged, advantages: Ragged, low: float, high: float) -> float:
    """The paper's objective: the ratio of a sequence, clipped, the mean over sequences."""
    losses = []
    for row in range(ROWS):
        changes = [a - b for a, b in zip(written(lp, row), written(old, row), strict=True)]
        if changes:
            rho, advantage = math.exp(sum(changes) / len(changes)), written(advantages, row)[0]
            losses.append(max(-advantage * rho, -advantage * max(1 - low, min(1 + high, rho))))
    return sum(losses) / ROWS


def slow_geo_mean(lp: Ragged, old: Ragged, advantages: Ragged, low: float, high: float) -> float:
    losses = []
    for row in range(ROWS):
        changes = [a - b for a, b in zip(written(lp, row), written(old, row), strict=True)]
        if changes:
            advantage = written(advantages, row)[0]
            clipped = [min(d, high) if advantage > 0 else max(d, -low) for d in changes]
            losses.append(-advantage * math.exp(sum(clipped) / len(clipped)))
    return sum(losses) / ROWS


@pytest.mark.parametrize("seed", range(5))
def test_gspo_is_its_formula(seed: int) -> None:
    found = total(gspo, *columns(seed), clip=0.1, clip_high=0.15)
    assert found.item() == pytest.approx(slow_gspo(*columns(seed), 0.1, 0.15))


@pytest.mark.parametrize("seed", range(5))
def test_geo_mean_is_its_formula(seed: int) -> None:
    found = total(geo_mean, *columns(seed), log_clip=0.1, log_clip_high=0.15)
    assert found.item() == pytest.approx(slow_geo_mean(*columns(seed), 0.1, 0.15))


@pytest.mark.parametrize("seed", range(5))
def test_gspo_gradient_is_that_of_the_sequences_ratio_by_finite_differences(seed: int) -> None:
    lp, old, advantages = columns(seed)
    values = lp.values.clone().requires_grad_()
    loss = total(gspo, lp.like(values), old, advantages, clip=0.1, clip_high=0.15)
    (gradient,) = torch.autograd.grad(loss, values)
    expected = [
        (
            slow_gspo(lp.like(lp.values + step), old, advantages, 0.1, 0.15)
            - slow_gspo(lp.like(lp.values - step), old, advantages, 0.1, 0.15)
        )
        / 2e-6
        for step in torch.eye(12, dtype=torch.float64) * 1e-6
    ]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-7)


def test_geo_mean_gradient_by_finite_differences() -> None:
    lp, old, advantages = columns(1)
    assert torch.autograd.gradcheck(
        lambda flat: total(geo_mean, lp.like(flat), old, advantages, log_clip=0.1),
        lp.values.clone().requires_grad_(),
    )


def test_gspo_by_hand() -> None:
    # ratios exp((0.4 - 0.2) / 2) and, of the row after it, 1
    lp, old = Ragged.of([[0.4, -0.2], [0.3]]), Ragged.of([[0.0, 0.0], [0.3]])
    everything = Ragged.of([[True, True], [True]], torch.bool)
    out = gspo(lp, old, Ragged.of([[1.0, 1.0], [-2.0]]), everything, clip=0.05, clip_high=0.05)
    assert out.tolist() == [pytest.approx([-1.05, -1.05]), [2.0]]
    free = gspo(lp, old, Ragged.of([[1.0, 1.0], [-2.0]]), everything, clip=0.5, clip_high=0.5)
    assert free.tolist() == [pytest.approx([-math.exp(0.1)] * 2), [2.0]]


def test_geo_mean_by_hand() -> None:
    lp, old = Ragged.of([[1.0, -1.0], [1.0, -1.0]]), Ragged.of([[0.0, 0.0]] * 2)
    everything = Ragged.of([[True, True]] * 2, torch.bool)
    out = geo_mean(lp, old, Ragged.of([[1.0, 1.0], [-1.0, -1.0]]), everything)
    # A > 0 clips the 1 to 0.4, A < 0 the -1 to -0.4
    assert out.tolist() == [pytest.approx([-math.exp(-0.3)] * 2), pytest.approx([math.exp(0.3)] * 2)]


@both
def test_at_the_old_policy_it_is_the_policy_gradient(loss: Callable[..., Ragged]) -> None:
    lp, _, advantages = columns(2)
    values = lp.values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(loss, lp.like(values), lp, advantages), values)
    lengths = mask().spread(mask().sum().clamp(min=1)).values
    expected = torch.where(mask().values, -advantages.values / lengths / ROWS, 0)
    torch.testing.assert_close(gradient, expected)


@both
def test_it_does_not_depend_on_the_order_of_rows_nor_on_tokens_outside_the_mask(
    loss: Callable[..., Ragged],
) -> None:
    order = torch.tensor([3, 4, 0, 2, 1])
    lp, old, advantages = columns(3)
    out = loss(lp, old, advantages, mask())
    moved = loss(*(column.take(order) for column in (lp, old, advantages, mask())))
    torch.testing.assert_close(moved.values, out.take(order).values)
    noisy = lp.like(torch.where(mask().values, lp.values, 99.0))
    other = loss(noisy, old, advantages, mask())
    torch.testing.assert_close(other.values[mask().values], out.values[mask().values])


@both
def test_a_far_ratio_and_a_batch_of_nothing_are_survived(loss: Callable[..., Ragged]) -> None:
    one = Ragged.of([[True]], torch.bool)
    far = torch.tensor([1000.0], dtype=torch.float64, requires_grad=True)
    out = loss(one.like(far), one.like(torch.zeros(1)), one.like(-torch.ones(1)), one).values
    (gradient,) = torch.autograd.grad(out.sum(), far)
    assert out.isfinite().all() and gradient.isfinite().all()
    nothing = Ragged.of([[False, False], []], torch.bool)
    zeros = nothing.like(torch.zeros(2))
    assert loss(zeros, zeros, zeros, nothing).tolist() == [[0.0, 0.0], []]


@both
def test_micro_batches_add_up_to_the_batch(loss: Callable[..., Ragged]) -> None:
    lp, old, advantages = columns(5)
    totals, parts = Totals(int(mask().values.sum()), ROWS), []
    for rows in ([2], [4, 0], [1, 3]):
        cut = [column.take(torch.tensor(rows)) for column in (lp, old, advantages, mask())]
        parts.append(aggregate(loss(*cut), cut[3], totals, "seq-mean-token-mean"))
    assert sum(parts).item() == pytest.approx(total(loss, lp, old, advantages).item())


def test_the_ratio_of_a_sequence_without_a_mask_is_1() -> None:
    lp, old, _ = columns(4)
    ratios = mask().like(sequence_ratio(lp.values, old, mask()))
    assert ratios[2].tolist() == [1.0, 1.0]
    assert ratios[3].tolist() == pytest.approx([math.exp((lp[3] - old[3]).mean().item())] * 3)


def slow_vespo(lp: Ragged, old: Ragged, advantages: Ragged, at: Ragged) -> float:
    """-phi(W) A log pi of whole responses, the mean over sequences; W by ``lp``, log pi by ``at``."""
    losses = []
    for row in range(ROWS):
        if changes := [a - b for a, b in zip(written(lp, row), written(old, row), strict=True)]:
            whole, advantage = math.exp(sum(changes)), written(advantages, row)[0]
            k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
            losses.append(-(whole**k) * math.exp(rate * (1 - whole)) * advantage * sum(written(at, row)))
    return sum(losses) / ROWS


def vespo_total(lp: Ragged, old: Ragged, advantages: Ragged) -> torch.Tensor:
    totals = Totals(int(mask().values.sum()), ROWS)
    return aggregate(vespo(lp, old, advantages, mask()), mask(), totals, "seq-mean-token-sum")


@pytest.mark.parametrize("seed", range(5))
def test_vespo_and_its_gradient_are_those_of_whole_responses(seed: int) -> None:
    lp, old, advantages = columns(seed)
    values = lp.values.clone().requires_grad_()
    loss = vespo_total(lp.like(values), old, advantages)
    assert loss.item() == pytest.approx(slow_vespo(lp, old, advantages, lp))
    (gradient,) = torch.autograd.grad(loss, values)
    expected = [  # the weight is held fixed
        (
            slow_vespo(lp, old, advantages, lp.like(lp.values + step))
            - slow_vespo(lp, old, advantages, lp.like(lp.values - step))
        )
        / 2e-6
        for step in torch.eye(12, dtype=torch.float64) * 1e-6
    ]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-7)


def test_vespo_fades_on_both_sides_and_survives_far_ratios() -> None:
    one = Ragged.of([[True]], torch.bool)
    weights = [
        -vespo(one.like(torch.tensor([lp])), one.like(torch.tensor([lp - d])), one.like(torch.ones(1)), one)
        .values.div(lp)
        .item()
        for lp, d in ((-1.0, -1000.0), (-1.0, -3.0), (-1.0, 0.0), (-1.0, 1.0), (-1.0, 1000.0))
    ]
    assert weights[2] == pytest.approx(1.0) and weights[0] < weights[1] < 0.05
    assert weights[3] < 0.05 and weights[4] == 0.0


def test_vespo_of_micro_batches_adds_up_to_that_of_the_batch() -> None:
    lp, old, advantages = columns(5)
    totals, parts = Totals(int(mask().values.sum()), ROWS), []
    for rows in ([2], [4, 0], [1, 3]):
        cut = [column.take(torch.tensor(rows)) for column in (lp, old, advantages, mask())]
        parts.append(aggregate(vespo(*cut), cut[3], totals, "seq-mean-token-sum"))
    assert sum(parts).item() == pytest.approx(vespo_total(lp, old, advantages).item())
