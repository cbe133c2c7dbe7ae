"""Rewards per token: a score per sample and a KL penalty."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlgraph.nodes.loss.policy import KlKind
from rlgraph.nodes.loss.policy import kl as estimate
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, boolean, float32, op, samples, tokens


@op(assumes=("reference",), measures={"beta": "kl/ref"})
def kl_penalty(
    ctx: Context,
    rewards: float32[samples],
    old_logprobs: float32[samples, tokens],
    ref_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    beta: Annotated[float, Field(ge=0)] = 0.001,
    kl: KlKind = "k1",
) -> float32[samples, tokens]:
    """Rewards per token: -beta KL(old, ref) on each token that the policy wrote, and the score on its last.

    r_t = -beta kl_t + [t is the last in the loss mask] s (arXiv 1909.08593, 2203.02155). A sample with
    nothing in its loss mask gets no reward: its score has no token to stand on. Records ``kl/ref``, nats a
    token.

    Attributes:
        beta: what a nat of KL costs, in units of the reward, at least 0; may be adaptive, and follows
            ``kl/ref`` then.
        kl: the estimator: k1 = lp - ref, k2 = its square / 2, k3 = exp(ref - lp) - (ref - lp) - 1, abs.

    Example:
        shaped: {op: reward.kl_penalty, beta: 0.001}
    """
    divergence = estimate(old_logprobs.values, ref_logprobs.values, kl)
    divergence = torch.where(loss_mask.values, divergence, 0)
    ctx.record("kl/ref", float(divergence.double().sum()), count=int(loss_mask.values.sum()))
    rows, last = _last_written(loss_mask)
    return loss_mask.like((-beta * divergence).index_add(0, last, rewards[rows].to(divergence.dtype)))


def _last_written(loss_mask: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with anything in the loss mask, and the index of its last token in ``[all tokens]``."""
    written = loss_mask.values.nonzero().squeeze(1)
    rows, counts = torch.unique_consecutive(loss_mask.row_of[written], return_counts=True)
    return rows, written[counts.cumsum(0) - 1]
