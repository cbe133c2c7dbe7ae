"""Rewards made of other rewards: a weighted sum, and penalties for length and for leaving the reference."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat

from rlgraph.nodes.loss.policy import KlKind
from rlgraph.nodes.loss.policy import kl as estimate
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, boolean, float32, op, samples, tokens

OTHERS = {"rewards_2": "weight_2", "rewards_3": "weight_3", "rewards_4": "weight_4"}


@op(when=OTHERS)
def total(
    ctx: Context,
    rewards: float32[samples],
    rewards_2: float32[samples] | None,
    rewards_3: float32[samples] | None,
    rewards_4: float32[samples] | None,
    *,
    weight: float = 1.0,
    weight_2: float = 1.0,
    weight_3: float = 0.0,
    weight_4: float = 0.0,
) -> float32[samples]:
    """sum_k w_k s_k of two to four rewards per sample; a reward of weight 0 is not read.

    Linear scalarisation (Roijers et al. 2013, doi 10.1613/jair.3987); advantage.gdpo normalises each reward
    before it adds them. Records ``mean`` under the node's name.

    Attributes:
        weight: of ``rewards``.
        weight_2: of ``rewards_2``.
        weight_3: of ``rewards_3``.
        weight_4: of ``rewards_4``.

    Example:
        scores: {op: reward.sum, in: {rewards_2: formatted}, weight_2: 0.1}
    """
    weighed = [(rewards_2, weight_2), (rewards_3, weight_3), (rewards_4, weight_4)]
    out = weight * rewards
    for column, factor in weighed:
        out = out if column is None else out + factor * column
    ctx.record("mean", out)
    return out


@op()
def agreement(ctx: Context, verdicts: float32[samples], truth: float32[samples]) -> float32[samples]:
    """1 - |v - s|: how close a verdict v, 0 to 1, is to the true score s of what it judges.

    The reward for training a judge when the truth is known. Records ``mean`` under the node's name.

    Example:
        agreed: {op: reward.agreement, in: {verdicts: praised, truth: rewards}}
    """
    out = 1 - (verdicts - truth).abs()
    ctx.record("mean", out)
    return out


@op()
def overlong(
    ctx: Context,
    rewards: float32[samples],
    loss_mask: boolean[samples, tokens],
    *,
    limit: Annotated[int, Field(ge=1)],
    buffer: Annotated[int, Field(ge=1)],
    penalty: NonNegativeFloat = 1.0,
) -> float32[samples]:
    """The reward minus a penalty that grows over the last tokens before the limit (DAPO, arXiv 2503.14476).

    s - penalty clip((len - (limit - buffer)) / buffer, 0, 1), where len is the number of a sample's tokens in
    its loss mask: no penalty up to limit - buffer, then a linear rise to the whole penalty at the limit.
    Records ``reward/overlong``, the mean of the penalty.

    Attributes:
        limit: the most tokens of a response, at least 1: the rollout's max_new_tokens.
        buffer: the penalty begins this many tokens before the limit, at least 1.
        penalty: the penalty of a response at the limit, in units of the reward, at least 0.

    Example:
        overlong: {op: reward.overlong, limit: 1024, buffer: 256}
    """
    excess = (loss_mask.sum() - (limit - buffer)) / buffer
    lost = penalty * excess.clamp(0, 1)
    ctx.record("reward/overlong", lost)
    return rewards - lost.to(rewards.dtype)


@op(
    assumes=("reference",),
    measures={"beta": "kl/ref"},
    when={"old_logprobs": "beta", "ref_logprobs": "beta"},
)
def kl_penalty(
    ctx: Context,
    rewards: float32[samples],
    old_logprobs: float32[samples, tokens] | None,
    ref_logprobs: float32[samples, tokens] | None,
    loss_mask: boolean[samples, tokens],
    *,
    beta: NonNegativeFloat = 0.001,
    kl: KlKind = "k1",
) -> float32[samples, tokens]:
    """Rewards per token: -beta KL(old, ref) on each token that the policy wrote, plus the score on the last.

    r_t = -beta kl_t + [t is the last in the loss mask] s (arXiv 1909.08593, 2203.02155). A sample with
    nothing in its loss mask gets no reward, since there is no token to put its score on. Records ``kl/ref``,
    in nats per token. With ``beta: 0`` no log-probs are read: only the score is put on the last token.

    Attributes:
        beta: the cost of a nat of KL, in units of the reward, at least 0; 0: no KL. It may be adaptive; it
            then follows ``kl/ref``.
        kl: the estimator: k1 = lp - ref, k2 = its square / 2, k3 = exp(ref - lp) - (ref - lp) - 1, abs.

    Example:
        shaped: {op: reward.kl_penalty, beta: 0.001}
    """
    divergence = torch.zeros(len(loss_mask.values), device=loss_mask.values.device)
    if old_logprobs is not None and ref_logprobs is not None:
        divergence = estimate(old_logprobs.values, ref_logprobs.values, kl)
        divergence = torch.where(loss_mask.values, divergence, 0)
        ctx.record("kl/ref", float(divergence.double().sum()), int(loss_mask.values.sum()), over="tokens")
    rows, last = _last_written(loss_mask)
    return loss_mask.like((-beta * divergence).index_add(0, last, rewards[rows].to(divergence.dtype)))


@op()
def per_sample(rewards: float32[samples, tokens], loss_mask: boolean[samples, tokens]) -> float32[samples]:
    """The sum of a sample's rewards per token, over its loss mask.

    After reward.kl_penalty it is s - beta KL(old, ref) of the whole response, for estimators that compare
    samples: the KL is in the reward before the baseline is subtracted (RLOO, arXiv 2402.14740).

    Example:
        scores: {op: reward.per_sample, in: {rewards: shaped}}
    """
    return rewards.like(torch.where(loss_mask.values, rewards.values.double(), 0)).sum().float()


def _last_written(loss_mask: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with anything in the loss mask, and the index of its last token in ``[all tokens]``."""
    written = loss_mask.values.nonzero().squeeze(1)
    rows, counts = torch.unique_consecutive(loss_mask.row_of[written], return_counts=True)
    return rows, written[counts.cumsum(0) - 1]
