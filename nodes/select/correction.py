"""Rollout corrections: importance weights for rows that other weights, or another engine, sampled.

With pi the train engine's ``old_logprobs`` and mu the ``rollout_logprobs`` that were measured while
sampling, a token's ratio is pi / mu: it makes up for stale weights, and for two engines that compute
differently. Name the node ``rollout_weights``, and ``update.policy`` multiplies its loss by it.

A sequence is what its loss mask covers. All weights are 0 outside it. Sums run in float64.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from rlgraph.nodes.loss.policy import KlKind, kl
from rlgraph.nodes.loss.ratio import LOG_RATIO_LIMIT, masked_mean
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, boolean, float32, op, samples, tokens

Level = Literal["token", "sequence"]


@op(assumes=("behaviour_logprobs",))
def tis(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    rollout_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    level: Level = "token",
    floor: NonNegativeFloat = 0.0,
    cap: PositiveFloat | None = 2.0,
) -> float32[samples, tokens]:
    """Truncated importance weights (V-trace, arXiv 1802.01561; https://fengyao.notion.site/off-policy-rl).

    w = min(max(rho, floor), cap), rho = exp(clamp(old_logprobs - rollout_logprobs, -20, 20)) of each token;
    by sequence, of the sum over its tokens. Records ``weight``, the mean per token, and ``cut``, the share of
    tokens whose weight is the floor or the cap instead of rho.

    Attributes:
        level: token, a ratio each; sequence, the product of a sequence's ratios on each of its tokens, which
            is unbiased and varies far more.
        floor: the least that a weight may be, at least 0; 0 for as little as rho.
        cap: the most that a weight may be, above 0; null for as much as rho.

    Example:
        rollout_weights: {op: correction.tis, cap: 2.0}
    """
    ratio = _ratio(old_logprobs, rollout_logprobs, loss_mask, level)
    most = math.inf if cap is None else cap
    return _weights(ctx, ratio.clamp(floor, most), (ratio > most) | (ratio < floor), loss_mask)


@op(assumes=("behaviour_logprobs",))
def mis(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    rollout_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    level: Level = "token",
    low: NonNegativeFloat = 0.5,
    high: PositiveFloat = 2.0,
) -> float32[samples, tokens]:
    """Masked importance weights (IcePop, arXiv 2510.18855): what is too far off does not count.

    w = rho where low <= rho <= high, else 0, rho = exp(clamp(old_logprobs - rollout_logprobs, -20, 20)) of
    each token; by sequence, of the sum over its tokens. Records ``weight``, the mean per token, and ``cut``,
    the share of tokens with weight 0.

    Attributes:
        level: token, a ratio each; sequence, the product of a sequence's ratios on each of its tokens.
        low: the least ratio that counts, at least 0.
        high: the largest ratio that counts, above 0.

    Example:
        rollout_weights: {op: correction.mis, low: 0.5, high: 2.0}
    """
    ratio = _ratio(old_logprobs, rollout_logprobs, loss_mask, level)
    outside = (ratio < low) | (ratio > high)
    return _weights(ctx, ratio.masked_fill(outside, 0.0), outside, loss_mask)


@op(assumes=("behaviour_logprobs",))
def reject(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    rollout_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    weights: float32[samples, tokens] | None,
    *,
    threshold: PositiveFloat,
    least: float | None = None,
    kl: Literal["k1", "k2", "k3"] = "k3",
    over: Literal["mean", "sum", "max", "token"] = "mean",
) -> float32[samples, tokens]:
    """Whole sequences rejected whose tokens are too unlikely by now (as in verl's rollout correction).

    0 on all tokens of a sequence whose mean KL(rollout || old), in nats per token, is above ``threshold`` in
    size; elsewhere ``weights``, or 1 where nothing writes them: a trust region, which with ``weights`` of
    correction.tis or correction.mis still corrects what it keeps. Records ``weight``, the mean per token, and
    ``cut``, the share of tokens that are rejected.

    With ``kl: k1`` the mean is that of -log rho, rho the ratio of old to rollout: ``threshold`` and ``least``
    are bounds on a sequence's geometric mean of ratios, G. G from a to b is ``threshold: -log a, least: -log
    b``. With ``weights`` of correction.tis sequences are left out by G and weighed by token (seq-mask-tis).

    Attributes:
        threshold: the most nats per token that a sequence may be off, above 0.
        least: the least that they may be, where that is not -``threshold``; k2 and k3 are never below 0.
        kl: the estimator, with d = rollout_logprobs - old_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d -
            1. k1 lets tokens make up for each other.
        over: what is compared: the mean of a sequence's tokens, their sum, the largest of them, or each token
            for itself, of which then those alone are left out that are outside.

    Example:
        rollout_weights: {op: correction.reject, threshold: 0.01}
    """
    kept_weights = (
        torch.ones_like(old_logprobs.values, dtype=torch.float64) if weights is None else weights.values
    )
    off = _divergence(old_logprobs, rollout_logprobs, loss_mask, kl, over)
    far = (off > threshold) | (off < (-threshold if least is None else least))
    return _weights(ctx, kept_weights.masked_fill(far, 0.0), far, loss_mask)


def _ratio(old: Ragged, rollout: Ragged, loss_mask: Ragged, level: Level) -> torch.Tensor:
    """Return rho of each token, or of its sequence, ``[all tokens]`` in float64."""
    difference = torch.where(loss_mask.values, old.values.double() - rollout.values.double(), 0)
    if level == "sequence":
        difference = old.spread(old.like(difference).sum()).values
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _divergence(
    old: Ragged,
    rollout: Ragged,
    loss_mask: Ragged,
    kind: KlKind,
    over: Literal["mean", "sum", "max", "token"],
) -> torch.Tensor:
    """Return KL(rollout || old) of each token, or what its sequence comes to, ``[all tokens]``."""
    values = kl(rollout.values.double(), old.values.double(), kind)
    divergence = old.like(torch.where(loss_mask.values, values, 0))
    if over == "token":
        return divergence.values
    if over == "mean":
        return old.spread(masked_mean(divergence, loss_mask)).values
    if over == "sum":
        return old.spread(divergence.sum()).values
    lowest = torch.where(loss_mask.values, values, -torch.inf)
    largest = torch.full((len(old),), -torch.inf, dtype=torch.float64)
    largest = largest.scatter_reduce(0, old.row_of, lowest, "amax")
    return old.spread(largest).values


def _weights(ctx: Context, weights: torch.Tensor, cut: torch.Tensor, loss_mask: Ragged) -> Ragged:
    """Record the weights ``[samples, tokens]`` and return them, 0 outside the loss mask."""
    written = loss_mask.values
    ctx.record("weight", float(weights[written].double().sum()), int(written.sum()), over="tokens")
    ctx.record("cut", float(cut[written].sum()), int(written.sum()), kind="share", over="tokens")
    return loss_mask.like(torch.where(written, weights, 0).float())
