"""Clip-Cov and KL-Cov: which tokens are held back, against a slow reference, and the losses' gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch

from recorded import means
from rlgraph.nodes.loss.covariance import band, clip_cov, kl_cov, top
from rlgraph.nodes.loss.policy import ppo_clip
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context

LENGTHS = [4, 1, 0, 7, 3, 5, 6, 2]


def context(rows: int, node: str = "restrained", seed: int = 0, iteration: int = 0) -> Context:
    return Context(node=node, seed=seed, iteration=iteration, rows=range(rows), total_rows=rows)


def case(seed: int = 0, lengths: list[int] = LENGTHS) -> tuple[Ragged, Ragged, Ragged]:
    """Log-probs, advantages and a loss mask with holes; what it does not cover holds nonsense."""
    draw = torch.Generator().manual_seed(seed)
    rows = Ragged.of([[0.0] * length for length in lengths], torch.float64)
    count = len(rows.values)
    mask = rows.like(torch.rand(count, generator=draw) < 0.8)
    logprobs, advantages = (torch.randn(count, generator=draw, dtype=torch.float64) for _ in range(2))
    return (
        rows.like(logprobs.masked_fill(~mask.values, 1e6)),
        rows.like(advantages.masked_fill(~mask.values, -1e6)),
        mask,
    )


def slow_covariances(
    logprobs: Ragged, advantages: Ragged, mask: Ragged, minibatches: int
) -> list[dict[tuple[int, int], float]]:
    """For each mini-batch, (row, token) -> covariance."""
    out: list[dict[tuple[int, int], float]] = []
    for minibatch in range(minibatches):
        places = [
            (row, token)
            for row in range(len(mask))
            if row * minibatches // len(mask) == minibatch
            for token in range(int(mask.lengths[row]))
            if mask[row][token]
        ]
        lp = {place: float(logprobs[place[0]][place[1]]) for place in places}
        adv = {place: float(advantages[place[0]][place[1]]) for place in places}
        lp_mean, adv_mean = (statistics.mean(x.values()) if x else 0.0 for x in (lp, adv))
        out.append({place: (lp[place] - lp_mean) * (adv[place] - adv_mean) for place in places})
    return out


def held(column: Ragged) -> set[tuple[int, int]]:
    return {(row, token) for row in range(len(column)) for token in column[row].nonzero().flatten().tolist()}


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_top_takes_the_largest_of_each_mini_batch(minibatches: int, share: float) -> None:
    columns = case()
    expected = set()
    for found in slow_covariances(*columns, minibatches):
        ranked = sorted(found, key=lambda place: -found[place])
        expected |= set(ranked[: max(1, int(share * len(ranked)))])
    ctx = context(len(LENGTHS))
    assert held(top(ctx, *columns, share=share, minibatches=minibatches)) == expected
    assert means(ctx)["restrained/share"] == (len(expected), int(columns[2].values.sum()))


@pytest.mark.parametrize("minibatches", [1, 3])
def test_band_draws_from_the_tokens_between_its_bounds(minibatches: int) -> None:
    columns = case(1)
    found = slow_covariances(*columns, minibatches)
    inside = [{place for place, value in part.items() if 0.1 < value < 1.0} for part in found]
    everything = band(context(8), *columns, share=1.0, low=0.1, high=1.0, minibatches=minibatches)
    assert held(everything) == set().union(*inside)
    few = held(band(context(8), *columns, share=0.2, low=0.1, high=1.0, minibatches=minibatches))
    for part, allowed in zip(found, inside, strict=True):
        assert len(few & part.keys()) == min(len(allowed), max(1, int(0.2 * len(part))))
    assert few <= held(everything)


def test_top_by_hand() -> None:
    mask = Ragged.of([[True, True, False, True, True]], torch.bool)
    logprobs = mask.like(torch.tensor([2.0, -2.0, 9.0, 1.0, -1.0]))  # mean 0
    advantages = mask.like(torch.tensor([3.0, 3.0, 9.0, 0.0, -2.0]))  # mean 1: covariances 4, -4, -1, 3
    ctx = context(1)
    assert top(ctx, logprobs, advantages, mask, share=0.5).tolist() == [[True, False, False, False, True]]
    assert means(ctx) == {"restrained/mean": (pytest.approx(2.0), 4), "restrained/share": (2.0, 4)}


def test_nothing_between_the_bounds_holds_nothing_back() -> None:
    columns = case(2)
    assert not held(band(context(8), *columns, low=1e5, high=1e6))


@pytest.mark.parametrize("select", [band, top])
def test_of_no_rows_and_of_no_tokens(select: Callable[..., Ragged]) -> None:
    nothing = Ragged.of([], torch.bool)
    zeros = nothing.like(torch.zeros(0))
    assert select(context(0), zeros, zeros, nothing, minibatches=2).tolist() == []
    prompts = Ragged.of([[False, False], []], torch.bool)
    zeros = prompts.like(torch.zeros(2))
    assert select(context(2), zeros, zeros, prompts).tolist() == [[False, False], []]


def test_a_draw_is_of_the_run_the_iteration_the_node_the_row_and_the_token() -> None:
    columns = case(3, [40] * 6)
    options = {"share": 0.1, "low": -9.0, "high": 9.0}
    first = held(band(context(6), *columns, **options))
    assert first == held(band(context(6), *columns, **options))
    others = [context(6, seed=1), context(6, iteration=1), context(6, node="other")]
    assert all(held(band(other, *columns, **options)) != first for other in others)


def test_draws_are_even_over_rows_and_places() -> None:
    rows, length = 64, 64
    mask = Ragged.of([[True] * length] * rows, torch.bool)
    zeros = mask.like(torch.zeros(rows * length))
    drawn = band(context(rows), zeros, zeros, mask, share=0.25, low=-1.0, high=1.0).values.view(rows, length)
    assert int(drawn.sum()) == rows * length // 4
    # the count in a row or column of 64 is hypergeometric: mean 16, deviation about 3.4
    for axis in (0, 1):
        counts = drawn.sum(axis)
        assert counts.min() >= 4 and counts.max() <= 30


def test_padding_does_not_show() -> None:
    logprobs, advantages, mask = case(4)
    plain = top(context(8), logprobs, advantages, mask, share=0.3, minibatches=2)

    def padded(column: Ragged, fill: float) -> Ragged:
        return Ragged.of([[*row, fill, fill] for row in column.tolist()], column.values.dtype)

    wide = top(
        context(8), padded(logprobs, 3.0), padded(advantages, 3.0), padded(mask, 0), share=0.3, minibatches=2
    )
    assert held(wide) == held(plain)


def losses_case(seed: int) -> tuple[Ragged, Ragged, Ragged, Ragged]:
    draw = torch.Generator().manual_seed(seed)
    rows = Ragged.of([[0.0] * 5, [], [0.0] * 3], torch.float64)
    lp, old, advantages = (rows.like(torch.randn(8, generator=draw, dtype=torch.float64)) for _ in range(3))
    return lp, old, advantages, rows.like(torch.tensor([True, False] * 4))


def test_clip_cov_is_ppo_but_for_the_restrained() -> None:
    lp, old, advantages, restrained = losses_case(0)
    found = clip_cov(lp, old, advantages, restrained, clip=0.2, clip_high=0.3)
    expected = ppo_clip(lp, old, advantages, clip=0.2, clip_high=0.3).values.clone()
    expected[::2] = 0
    assert found.values.tolist() == expected.tolist()


def test_kl_cov_is_its_formula() -> None:
    lp, old, advantages, restrained = losses_case(1)
    expected = [
        -a * math.exp(new - before) + (0.7 * abs(new - before) if held_back else 0.0)
        for new, before, a, held_back in zip(
            *(c.values.tolist() for c in (lp, old, advantages, restrained)), strict=True
        )
    ]
    assert kl_cov(lp, old, advantages, restrained, coef=0.7).values.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_gradients_by_finite_differences(loss: Callable[..., Ragged]) -> None:
    lp, old, advantages, restrained = losses_case(2)
    values = lp.values.clone().requires_grad_()

    def flat(now: torch.Tensor) -> torch.Tensor:
        return loss(lp.like(now), old, advantages, restrained).values

    assert torch.autograd.gradcheck(flat, values, eps=1e-7, atol=1e-5)


def test_the_gradients_of_restrained_tokens() -> None:
    lp, old, advantages, restrained = losses_case(3)
    values = lp.values.clone().requires_grad_()
    (none,) = torch.autograd.grad(clip_cov(lp.like(values), old, advantages, restrained).values.sum(), values)
    assert none[::2].eq(0).all() and none[1::2].ne(0).any()
    # at the old policy KL-Cov's penalty is at its least, and its gradient that of the plain loss
    at_old = old.values.clone().requires_grad_()
    (start,) = torch.autograd.grad(kl_cov(old.like(at_old), old, advantages, restrained).values.sum(), at_old)
    torch.testing.assert_close(start, -advantages.values)


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_micro_batches_give_the_losses_of_the_batch(loss: Callable[..., Ragged]) -> None:
    columns = losses_case(4)
    whole = loss(*columns)
    for rows in ([2, 0], [1]):
        part = loss(*(column.take(torch.tensor(rows)) for column in columns))
        assert part.tolist() == [whole[row].tolist() for row in rows]


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_a_far_ratio_is_survived(loss: Callable[..., Ragged]) -> None:
    rows = Ragged.of([[True, True]], torch.bool)
    far, zero, one = (rows.like(torch.tensor(x)) for x in ([1e3, -1e3], [0.0, 0.0], [-1.0, 1.0]))
    assert loss(far, zero, one, rows).values.isfinite().all()
