"""Weights of tokens that say where a loss learns: name the node ``token_weights``, and ``update.policy``
multiplies its loss by it, beside the ``rollout_weights`` of a correction.

What is chosen is chosen over a whole mini-batch, which no micro-batch sees: so weights are a column, made
before the update. All weights are 0 outside the loss mask. ``weights`` of another node are multiplied.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, PositiveFloat

from rlgraph.nodes.loss.covariance import TokenShare, minibatch_sizes
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, boolean, float32, op, samples, tokens


@op(rows="all", roles={"minibatches": "minibatches"})
def entropy(
    ctx: Context,
    entropy: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    weights: float32[samples, tokens] | None,
    *,
    share: TokenShare = 0.2,
    minibatches: Annotated[int, Field(ge=1)] = 1,
) -> float32[samples, tokens]:
    """Only the tokens of highest entropy: those that decide where a response goes (arXiv 2506.01939).

    1 if the entropy is at least the (1 - share) quantile of a mini-batch's tokens in the loss mask, else 0;
    the quantile is interpolated between tokens. Entropies are those of logprobs.entropy, before the update;
    the paper uses current entropies, which are the same in an iteration's first optimizer step. Means still
    count tokens of weight 0. Records ``share``, the fraction of tokens that count, and ``threshold``, the
    mean of the quantiles in nats.

    Attributes:
        share: the fraction of a mini-batch's tokens that count, above 0 and at most 1.
        minibatches: the ``minibatches`` of the update, at least 1; 1: a quantile of the whole batch.

    Example:
        token_weights: {op: weight.entropy, share: 0.2, minibatches: 4}
    """
    sizes = minibatch_sizes(ctx, loss_mask, minibatches)
    minibatch_entropies = entropy.values[loss_mask.values].double().split(sizes)
    bounds = [_quantile(entropies, 1 - share) for entropies in minibatch_entropies if len(entropies)]
    for bound in bounds:
        ctx.record("threshold", bound, over="optimizer steps")
    chosen = [
        entropies >= bound for entropies, bound in zip(filter(len, minibatch_entropies), bounds, strict=True)
    ]
    return _weights(ctx, chosen, loss_mask, weights)


@op(rows="all", roles={"minibatches": "minibatches"}, assumes=("behaviour_logprobs",))
def second_moment(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    rollout_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    weights: float32[samples, tokens] | None,
    *,
    limit: PositiveFloat = 0.04,
    minibatches: Annotated[int, Field(ge=1)] = 1,
) -> float32[samples, tokens]:
    """The tokens that remain after the most off-policy ones are removed (M2PO, arXiv 2510.01161).

    With d = old_logprobs - rollout_logprobs, 0 for the tokens of a mini-batch with the largest d^2, as few as
    bring the mean d^2 of the others below ``limit``; if that is impossible, one token is left. 1 for the
    others. It bounds the variance of importance weights. Records ``share``, the fraction of tokens that
    count.

    Attributes:
        limit: the upper bound of a mini-batch's mean squared log ratio, in nats squared, above 0.
        minibatches: the ``minibatches`` of the update, at least 1; 1: a mean of the whole batch.

    Example:
        token_weights: {op: weight.second_moment, limit: 0.04, minibatches: 4}
    """
    sizes = minibatch_sizes(ctx, loss_mask, minibatches)
    log_ratio = old_logprobs.values.double() - rollout_logprobs.values.double()
    chosen = []
    for moments in log_ratio[loss_mask.values].square().split(sizes):
        smallest = moments.argsort(stable=True)
        means = moments[smallest].cumsum(0) / torch.arange(1, len(moments) + 1)
        kept_count = max(int((means < limit).sum()), 1)  # means of ever larger numbers rise
        is_kept = torch.zeros(len(moments), dtype=torch.bool)
        is_kept[smallest[:kept_count]] = True
        chosen.append(is_kept)
    return _weights(ctx, chosen, loss_mask, weights)


def _quantile(values: torch.Tensor, share: float) -> float:
    """Return the value that a share of the values lies below, interpolated between two neighbours."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    near = round(place)
    if math.isclose(place, near, rel_tol=1e-9):
        return float(ordered[near])  # what is on a value by rounding alone is on it
    lower = int(place)
    return float(torch.lerp(ordered[lower], ordered[lower + 1], place - lower))


def _weights(ctx: Context, chosen: list[torch.Tensor], loss_mask: Ragged, weights: Ragged | None) -> Ragged:
    """Return the weights ``[samples, tokens]`` of chosen tokens, given for each mini-batch's in turn."""
    written = loss_mask.values
    out = torch.zeros(len(written))
    is_chosen = torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.bool)
    out[written] = is_chosen.float()
    ctx.record("share", float(is_chosen.sum()), len(is_chosen), kind="share", over="tokens")
    return loss_mask.like(out if weights is None else out * weights.values)
