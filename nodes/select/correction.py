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

    w = min(max(rho, floor), cap), rho = exp(clamp(old_logprobs - rollout_logprobs, -20, 20)) for each token,
    or for the sum over a sequence's tokens with ``level: sequence``. Records ``weight``, the mean per token,
    and ``cut``, the share of tokens whose weight is the floor or the cap instead of rho.

    Attributes:
        level: token: each token has its own ratio; sequence: each token of a sequence has the product of the
            sequence's ratios, which is unbiased but varies far more.
        floor: the smallest weight, at least 0; 0: no lower bound.
        cap: the largest weight, above 0; null: no upper bound.

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
    """Masked importance weights (IcePop, arXiv 2510.18855): tokens that are too far off don't count.

    w = rho where low <= rho <= high, else 0, rho = exp(clamp(old_logprobs - rollout_logprobs, -20, 20)) for
    each token, or for the sum over a sequence's tokens with ``level: sequence``. Records ``weight``, the mean
    per token, and ``cut``, the share of tokens with weight 0.

    Attributes:
        level: token: each token has its own ratio; sequence: each token of a sequence has the product of the
            sequence's ratios.
        low: the smallest ratio that counts, at least 0.
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
    """Reject whole sequences whose tokens have become too unlikely (as in verl's rollout correction).

    0 on all tokens of a sequence whose mean KL(rollout || old), in nats per token, is larger than
    ``threshold`` in absolute value; elsewhere ``weights``, or 1 if no node writes them. This is a trust
    region; with ``weights`` of correction.tis or correction.mis the sequences that it keeps are still
    corrected. Records ``weight``, the mean per token, and ``cut``, the share of rejected tokens.

    With ``kl: k1`` the mean is that of -log rho, where rho is the ratio of old to rollout: ``threshold`` and
    ``least`` bound G, the geometric mean of a sequence's ratios. G from a to b is ``threshold: -log a, least:
    -log b``. With ``weights`` of correction.tis, sequences are left out by G and weighted per token
    (seq-mask-tis).

    Attributes:
        threshold: the largest deviation of a sequence, in nats per token, above 0.
        least: the lower bound, if it is not -``threshold``; k2 and k3 are never below 0.
        kl: the estimator, with d = rollout_logprobs - old_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d -
            1. With k1, tokens can offset each other.
        over: what is compared with the bounds: the mean over a sequence's tokens, their sum, their maximum,
            or each token by itself, in which case only the tokens that are out of bounds are left out.

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
