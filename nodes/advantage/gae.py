"""Advantage estimators per token: they turn rewards per token into a weight for each token of the policy.

Sums run in float64, so that the order of rows doesn't show in float32.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, boolean, float32, op, samples, tokens

EPSILON = 1e-8  # added to sums that may be 0


class Gae(NamedTuple):
    """The columns that ``advantage.gae`` writes."""

    advantages: float32[samples, tokens]
    returns: float32[samples, tokens]


@op(rows="all", assumes=("critic_values",))
def gae(
    rewards: float32[samples, tokens],
    values: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95,
    whiten: bool = True,
) -> Gae:
    """Generalised advantage estimation (arXiv 1506.02438), and the critic's targets.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V. "Next" is the
    next token that the policy wrote: V and A pass through tokens outside the loss mask (tool output), where
    both outputs are 0 and rewards don't count. V is 0 after the last token. Advantages are whitened over the
    batch, (A - mean) / sqrt(unbiased variance + 1e-8), after the returns are computed.

    Attributes:
        gamma: discount per token, 0 to 1.
        lam: weight of longer returns: 0 is a single step (least variance), 1 the whole return (least bias).
        whiten: whether advantages are shifted and scaled to mean 0 and variance 1 over the loss mask.

    Example:
        advantages: {op: advantage.gae, gamma: 1.0, lam: 0.95, in: {rewards: shaped}}
    """
    estimates = values.compact(loss_mask)
    ahead = estimates.values.roll(-1)
    ahead[estimates.offsets[1:][estimates.lengths > 0] - 1] = 0
    error = rewards.compact(loss_mask).values + gamma * ahead - estimates.values
    advantages = estimates.like(error).discounted(gamma * lam)
    returns = advantages + estimates.values
    return Gae(scatter(_whiten(advantages) if whiten else advantages, loss_mask), scatter(returns, loss_mask))


@op(rows="all")
def reinforce_pp(
    rewards: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    whiten: bool = True,
) -> float32[samples, tokens]:
    """REINFORCE++ (arXiv 2501.03262): the discounted return-to-go, whitened over the batch; no critic.

    G_t = r_t + gamma G_{t+1}; A = (G - mean) / sqrt(unbiased variance + 1e-8) over the loss mask of the whole
    batch. "Next" is the next token that the policy wrote: returns pass undiscounted through tokens outside
    the loss mask (tool output), where A is 0 and rewards don't count. Without ``whiten``, A = G: after
    reward.kl_penalty on rewards that are already normalised, this is a group-relative advantage minus the KL
    from each token on.

    Attributes:
        gamma: discount per token, 0 to 1.
        whiten: whether returns are shifted and scaled to mean 0 and variance 1 over the loss mask.

    Example:
        advantages: {op: advantage.reinforce_pp, in: {rewards: shaped}}
    """
    returns = rewards.compact(loss_mask).discounted(gamma)
    return scatter(_whiten(returns) if whiten else returns, loss_mask)


@op()
def distill(
    ctx: Context,
    teacher_logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    prefix_coef: NonNegativeFloat = 0.0,
    limit: PositiveFloat | None = None,
) -> float32[samples, tokens]:
    """On-policy distillation (arXiv 2306.13649, 2306.08543): a teacher's log-prob minus the student's.

    A_t = w_t d_t, d_t = log p_teacher(token t) - log p_student(token t), both given the tokens before t, on
    samples of the student: the policy gradient of -KL(student, teacher) at each token, ignoring later tokens.
    w_t = 1 + prefix_coef (1 - sum_{k < t} |d_k| / sum_k |d_k|), summed over the loss mask of a sample: after
    a prefix that it would not have written, a teacher is less informative (IW-OPD, arXiv 2606.22600,
    algorithm 1). 0 where ``loss_mask`` is false. Records ``kl``, the mean of -d before ``limit`` clips it: an
    estimate of the KL in nats per token.

    Attributes:
        prefix_coef: how much more the first tokens count than the last, at least 0; 0: all count the same;
            0.5 in IW-OPD.
        limit: d is clipped to between -limit and limit, in nats, above 0; null: no bound.

    Example:
        advantages: {op: advantage.distill}
    """
    gap = torch.where(loss_mask.values, teacher_logprobs.values.double() - old_logprobs.values.double(), 0)
    ctx.record("kl", -float(gap.sum()), int(loss_mask.values.sum()), over="tokens")
    if limit is not None:
        gap = gap.clamp(-limit, limit)
    drift = loss_mask.like(gap.abs())
    rest = drift.discounted(1.0) / drift.spread(drift.sum().clamp(min=EPSILON)).values
    return loss_mask.like((gap * (1 + prefix_coef * rest)).float())


def whitened(column: Ragged, loss_mask: Ragged) -> Ragged:
    """Return (x - mean) / sqrt(unbiased variance + 1e-8) over the loss mask ``[samples, tokens]``, else 0.

    A single token has variance 0.
    """
    return scatter(_whiten(column.compact(loss_mask).values), loss_mask)


def _whiten(values: torch.Tensor) -> torch.Tensor:  # [all tokens]
    if not len(values):
        return values
    centred = values - values.mean()
    return centred / (centred.square().sum() / max(len(values) - 1, 1) + 1e-8).sqrt()


def scatter(values: torch.Tensor, loss_mask: Ragged) -> Ragged:
    """Return values of the tokens in the loss mask as a column in float32, 0 on the others."""
    out = values.new_zeros(len(loss_mask.values))
    out[loss_mask.values] = values
    return loss_mask.like(out.float())
