"""Advantage estimators per token: they turn rewards per token into a weight for each token of the policy.

Sums run in float64, so that the order of rows doesn't show in float32.
"""

from __future__ import annotations

import itertools
from typing import Annotated, NamedTuple

from pydantic import Field

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import Context, boolean, float32, op, samples, tokens


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
    """Generalised advantage estimation (arXiv 1506.02438) and the critic's targets.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V. "Next" is the
    next token that the policy wrote: V and A pass through tokens outside the loss mask (tool output), where
    both outputs are 0 and rewards don't count. V is 0 after the last. Advantages are whitened over the batch,
    (A - mean) / sqrt(unbiased variance + 1e-8), after the returns are taken.

    Attributes:
        gamma: discount per token, 0 to 1.
        lam: weight of longer returns: 0 is one step (least variance), 1 the whole return (least bias).
        whiten: whether advantages are shifted and scaled to mean 0 and variance 1 over the loss mask.

    Example:
        advantages: {op: advantage.gae, gamma: 1.0, lam: 0.95, in: {rewards: shaped}}
    """
    estimates = compact(values, loss_mask)
    advantages = _discounted(compact(rewards, loss_mask), estimates, gamma, lam)
    returns = advantages + estimates.values
    return Gae(scatter(_whiten(advantages) if whiten else advantages, loss_mask), scatter(returns, loss_mask))


@op(rows="all")
def reinforce_pp(
    rewards: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
) -> float32[samples, tokens]:
    """REINFORCE++ (arXiv 2501.03262): the discounted return-to-go, whitened over the batch; no critic.

    G_t = r_t + gamma G_{t+1}; A = (G - mean) / sqrt(unbiased variance + 1e-8) over the loss mask of the whole
    batch. "Next" is the next token that the policy wrote: returns pass undiscounted through tokens outside
    the loss mask (tool output), where A is 0 and rewards don't count.

    Attributes:
        gamma: discount per token, 0 to 1.

    Example:
        advantages: {op: advantage.reinforce_pp, in: {rewards: shaped}}
    """
    steps = compact(rewards, loss_mask)
    nothing = steps.like(torch.zeros_like(steps.values))
    return scatter(_whiten(_discounted(steps, nothing, gamma, 1.0)), loss_mask)


@op()
def distill(
    ctx: Context,
    teacher_logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
) -> float32[samples, tokens]:
    """On-policy distillation (arXiv 2306.13649, 2306.08543): a teacher's log-prob less the student's.

    A_t = log p_teacher(token t) - log p_student(token t), both before t, on what the student sampled: the
    policy gradient of -KL(student, teacher) at each token, where later tokens don't count. 0 where
    ``loss_mask`` is false. Records ``kl``, the mean of -A: an estimate of the KL, nats per token.

    Example:
        advantages: {op: advantage.distill}
    """
    gap = torch.where(loss_mask.values, teacher_logprobs.values - old_logprobs.values, 0)
    ctx.record("kl", -float(gap.double().sum()), int(loss_mask.values.sum()), over="tokens")
    return loss_mask.like(gap.float())


def whitened(column: Ragged, loss_mask: Ragged) -> Ragged:
    """Return (x - mean) / sqrt(unbiased variance + 1e-8) over the loss mask ``[samples, tokens]``, else 0.

    A single token has variance 0.
    """
    return scatter(_whiten(compact(column, loss_mask).values), loss_mask)


def _whiten(values: torch.Tensor) -> torch.Tensor:  # [all tokens]
    if not len(values):
        return values
    centred = values - values.mean()
    return centred / (centred.square().sum() / max(len(values) - 1, 1) + 1e-8).sqrt()


def _discounted(rewards: Ragged, values: Ragged, gamma: float, lam: float) -> torch.Tensor:
    """Return A_t of rows in which each token is one step, ``[all tokens]``.

    Rows lie step by step, the longest first, so that a step is one addition to a slice and nothing is padded:

        row a: a0 a1 a2        a0 b0 | a1 b1 | a2
        row b: b0 b1                     step 1 += gamma lam step 2[: its rows], then step 0 += ... step 1
    """
    ahead = values.values.roll(-1)
    ahead[rewards.offsets[1:][rewards.lengths > 0] - 1] = 0
    delta = rewards.values + gamma * ahead - values.values
    where, sizes = _by_step(rewards)
    packed = delta.new_empty(len(delta))
    packed[where] = delta
    for now, after in reversed([*itertools.pairwise(packed.split(sizes))]):
        now[: len(after)].add_(after, alpha=gamma * lam)
    return packed[where]


def _by_step(rows: Ragged) -> tuple[torch.Tensor, list[int]]:
    """Return each value's index when rows lie step by step ``[all tokens]``, and the rows of each step."""
    lengths, row = rows.lengths, rows.row_of
    rank = torch.empty_like(lengths)
    rank[lengths.argsort(descending=True, stable=True)] = torch.arange(len(lengths), device=lengths.device)
    sizes = (len(lengths) - torch.bincount(lengths).cumsum(0))[:-1]  # rows longer than 0, 1, 2, ...
    return offsets_of(sizes)[rows.place_of] + rank[row], sizes.tolist()


def compact(column: Ragged, loss_mask: Ragged) -> Ragged:
    """Return the rows with only their tokens in the loss mask, in float64."""
    return Ragged(column.values[loss_mask.values].double(), offsets_of(loss_mask.sum()))


def scatter(values: torch.Tensor, loss_mask: Ragged) -> Ragged:
    """Return values of the tokens in the loss mask as a column in float32, 0 on the others."""
    out = values.new_zeros(len(loss_mask.values))
    out[loss_mask.values] = values
    return loss_mask.like(out.float())
