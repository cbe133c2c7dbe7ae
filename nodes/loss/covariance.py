"""Losses that hold back the tokens whose covariance of log-prob and advantage lowers entropy most.

The covariance (arXiv 2505.22617) is taken against means over a mini-batch, which no micro-batch sees. So
the selection is a column, made before the update from ``old_logprobs``; the paper takes the log-probs of now.
The two are the same in the first mini-batch of an iteration, and differ later by what the policy moved.
Shapes: ``[written]`` is the values of a column in the loss mask.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlgraph.nodes.loss.policy import ppo_clip
from rlgraph.nodes.loss.ratio import LOG_RATIO_LIMIT, RatioLevel, ratio_of
from rlgraph.nodes.rollout.rollout import seed
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.splitmix import WEYL, mix
from rlgraph.ops import Context, boolean, float32, op, samples, tokens

TokenShare = Annotated[float, Field(gt=0, le=1)]


@op(rows="all", roles={"minibatches": "minibatches"})
def band(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    share: TokenShare = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    minibatches: Annotated[int, Field(ge=1)] = 1,
) -> boolean[samples, tokens]:
    """A few random tokens whose covariance is between two bounds, which Clip-Cov holds back.

    cov_t = (lp_t - mean lp)(A_t - mean A), means over the loss mask of a mini-batch, lp the ``old_logprobs``
    (arXiv 2505.22617). Of its tokens with low < cov < high, max(1, floor(share n)) are drawn, where n is the
    number of tokens in the mini-batch; if there are fewer, all of them. The draw depends on the run's seed,
    the iteration, the node, the row and the token. Records ``share``, the fraction of tokens that are true,
    and ``mean``, the mean covariance.

    Attributes:
        share: the fraction of a mini-batch's tokens to draw, above 0 and at most 1.
        low: the covariance must be above this, in nats times the advantage's unit.
        high: the covariance must be below this.
        minibatches: the ``minibatches`` of the update, at least 1; 1: means over the whole batch.

    Example:
        restrained: {op: covariance.band, minibatches: 4}
    """
    sizes = minibatch_sizes(ctx, loss_mask, minibatches)
    covariance = _covariance(ctx, old_logprobs, advantages, loss_mask, sizes)
    between = (covariance > low) & (covariance < high)
    return _chosen(ctx, loss_mask, sizes, _draws(ctx, loss_mask), between, share)


@op(rows="all", roles={"minibatches": "minibatches"})
def top(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    share: TokenShare = 2e-4,
    minibatches: Annotated[int, Field(ge=1)] = 1,
) -> boolean[samples, tokens]:
    """The tokens with the largest covariance: KL-Cov holds them back.

    cov_t is as in covariance.band; the max(1, floor(share n)) tokens of each mini-batch with the largest
    cov_t are taken, where n is its number of tokens (arXiv 2505.22617). Records ``share``, the fraction of
    tokens that are true, and ``mean``, the mean covariance.

    Attributes:
        share: the fraction of a mini-batch's tokens to take, above 0 and at most 1.
        minibatches: the ``minibatches`` of the update, at least 1; 1: means over the whole batch.

    Example:
        restrained: {op: covariance.top, minibatches: 4}
    """
    sizes = minibatch_sizes(ctx, loss_mask, minibatches)
    covariance = _covariance(ctx, old_logprobs, advantages, loss_mask, sizes)
    return _chosen(ctx, loss_mask, sizes, covariance, None, share)


@op(assumes=("sampling_logprobs",))
def clip_cov(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    restrained: boolean[samples, tokens],
    loss_mask: boolean[samples, tokens] | None = None,
    *,
    level: RatioLevel = "token",
    clip: PositiveFloat = 0.2,
    clip_high: PositiveFloat | None = None,
) -> float32[samples, tokens]:
    """PPO's clipped loss without the tokens of high covariance (Clip-Cov, arXiv 2505.22617).

    max(-A rho, -A clip(rho, 1 - clip, 1 + clip_high)), and 0 where ``restrained``; rho = exp(clamp(logprobs -
    old_logprobs, -20, 20)). Means still count the tokens that are held back. covariance.band writes
    ``restrained``.

    Attributes:
        level: which ratio rho is: token, sequence or product, as in ppo_clip.
        clip: how far below 1 the ratio may count, above 0; above 1 too unless ``clip_high`` is given.
        clip_high: how far above 1 the ratio may count, above 0.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: clip_cov, clip: 0.2}}
    """
    losses = ppo_clip(
        logprobs, old_logprobs, advantages, loss_mask, level=level, clip=clip, clip_high=clip_high
    )
    return logprobs.like(losses.values.masked_fill(restrained.values, 0.0))


@op(assumes=("sampling_logprobs",))
def kl_cov(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    restrained: boolean[samples, tokens],
    loss_mask: boolean[samples, tokens] | None = None,
    *,
    level: RatioLevel = "token",
    coef: NonNegativeFloat = 1.0,
) -> float32[samples, tokens]:
    """The policy gradient, with a KL penalty on tokens of high covariance (KL-Cov, arXiv 2505.22617).

    -A rho, plus coef |d| where ``restrained``, d = clamp(logprobs - old_logprobs, -20, 20), rho = exp(d).
    Nothing is clipped. covariance.top writes ``restrained``.

    Attributes:
        level: which ratio rho is: token, sequence or product, as in ppo_clip.
        coef: the cost of a nat on a restrained token, at least 0.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: kl_cov, coef: 1.0}}
    """
    moved = (logprobs.values - old_logprobs.values).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).abs()
    losses = -advantages.values * ratio_of(logprobs, old_logprobs, loss_mask, level)
    return logprobs.like(losses + coef * moved * restrained.values)


def minibatch_sizes(ctx: Context, loss_mask: Ragged, minibatches: int) -> list[int]:
    """Return the written tokens of each mini-batch; its rows stand together."""
    owner = torch.tensor(list(ctx.rows), dtype=torch.int64) * minibatches // max(1, ctx.total_rows)
    written = torch.zeros(minibatches, dtype=torch.int64).index_add(0, owner, loss_mask.sum())
    return list(written.tolist())


def _covariance(
    ctx: Context, logprobs: Ragged, advantages: Ragged, loss_mask: Ragged, sizes: list[int]
) -> torch.Tensor:
    """Return each written token's covariance with the means of its mini-batch, float64 ``[written]``."""
    logprobs_of_batches = logprobs.values[loss_mask.values].double().split(sizes)
    advantages_of_batches = advantages.values[loss_mask.values].double().split(sizes)
    products = []
    for logprob, advantage in zip(logprobs_of_batches, advantages_of_batches, strict=True):
        products.append((logprob - logprob.mean()) * (advantage - advantage.mean()))
    covariance = torch.cat(products)
    ctx.record("mean", float(covariance.sum()), len(covariance), over="tokens")
    return covariance


def _chosen(
    ctx: Context,
    loss_mask: Ragged,
    sizes: list[int],
    rank: torch.Tensor,
    allowed: torch.Tensor | None,
    share: float,
) -> Ragged:
    """Mark the allowed tokens (None: all) that rank highest, ``share`` of each mini-batch."""
    chosen = []
    start = 0
    for size in sizes:
        places = torch.arange(start, start + size)
        if allowed is not None:
            places = places[allowed[start : start + size]]
        wanted = max(1, int(share * size))
        best = rank[places].topk(min(len(places), wanted)).indices
        chosen.append(places[best])
        start += size
    written = loss_mask.values.nonzero().squeeze(1)
    out = torch.zeros_like(loss_mask.values)
    out[written[torch.cat(chosen)]] = True
    ctx.record("share", float(out.sum()), len(written), kind="share", over="tokens")
    return loss_mask.like(out)


def _draws(ctx: Context, loss_mask: Ragged) -> torch.Tensor:
    """Draw an int64 for each written token ``[written]`` from its row and its place in it alone."""
    rows = torch.tensor([seed(ctx.seed, ctx.iteration, ctx.node, row) for row in ctx.rows], dtype=torch.int64)
    return mix(loss_mask.spread(rows).values + (loss_mask.place_of + 1) * WEYL)[loss_mask.values]
