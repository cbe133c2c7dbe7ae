"""Advantage estimators: from rewards to a weight for each token that the policy wrote.

Shapes: ``[samples, tokens]`` is a ``Ragged`` column; ``[all tokens]`` its flat values; ``[rows, steps]`` is
padded on the right. Sums run in float64, so that the order of rows doesn't show in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field

from rlgraph.nodes.ragged import Ragged, offsets_of
from rlgraph.op import op
from rlgraph.types import boolean, float32, int64, samples, tokens

if TYPE_CHECKING:
    import torch


class Gae(NamedTuple):
    """What ``advantage.gae`` writes."""

    advantages: float32[samples, tokens]
    returns: float32[samples, tokens]


@op(rows="group", assumes=("groups",))
def grpo(
    rewards: float32[samples],
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    scale: bool = True,
    eps: Annotated[float, Field(gt=0)] = 1e-6,
) -> float32[samples, tokens]:
    """Group-relative advantages (GRPO, arXiv 2402.03300): one number a sample, over its loss mask.

    A = (s - mu) / (sigma + eps), mu and sigma the mean and the unbiased standard deviation of the rewards of
    one prompt's samples. A group of one has mu = 0 and sigma = 1. Without ``scale``, A = s - mu (Dr. GRPO,
    arXiv 2503.20783). 0 where ``loss_mask`` is false.

    Attributes:
        scale: whether to divide by the standard deviation.
        eps: what is added to the standard deviation, in units of the reward, above 0.

    Example:
        advantages: {op: advantage.grpo}
    """
    import torch

    members, count = torch.unique(group, return_inverse=True, return_counts=True)[1:]
    scores, single = rewards.double(), count == 1
    mean = _sum_by(members, scores, len(count)) / count
    centred = scores - mean.masked_fill(single, 0.0)[members]
    if scale:
        variance = _sum_by(members, (scores - mean[members]).square(), len(count)) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt().masked_fill(single, 1.0)[members] + eps)
    return loss_mask.like(torch.where(loss_mask.values, loss_mask.spread(centred).values, 0).float())


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
        gamma: discount a token, 0 to 1.
        lam: weight of longer returns: 0 is one step (least variance), 1 the whole return (least bias).
        whiten: whether advantages are shifted and scaled to mean 0 and variance 1 over the loss mask.

    Example:
        advantages: {op: advantage.gae, gamma: 1.0, lam: 0.95, in: {rewards: shaped}}
    """
    written = loss_mask.values
    estimates = _compact(values, loss_mask)
    advantages = _discounted(_compact(rewards, loss_mask), estimates, gamma, lam)
    returns = advantages + estimates.values
    advantages = _whiten(advantages) if whiten else advantages
    return Gae(_scatter(advantages, written, loss_mask), _scatter(returns, written, loss_mask))


def whitened(column: Ragged, loss_mask: Ragged) -> Ragged:
    """(x - mean) / sqrt(unbiased variance + 1e-8) over the loss mask, ``[samples, tokens]``; 0 outside it.

    A single token has variance 0.
    """
    written = loss_mask.values
    return _scatter(_whiten(column.values[written].double()), written, loss_mask)


def _whiten(values: torch.Tensor) -> torch.Tensor:  # [all tokens]
    if not len(values):
        return values
    centred = values - values.mean()
    return centred / (centred.square().sum() / max(len(values) - 1, 1) + 1e-8).sqrt()


def _discounted(rewards: Ragged, values: Ragged, gamma: float, lam: float) -> torch.Tensor:
    """A_t of rows in which each token is one step, ``[all tokens]``."""
    import torch

    value = torch.nn.functional.pad(values.padded(), (0, 1))  # [rows, steps + 1]
    delta = rewards.padded() + gamma * value[:, 1:] - value[:, :-1]  # [rows, steps], 0 in the padding
    out, carried = torch.zeros_like(delta), delta.new_zeros(len(delta))
    for step in range(delta.shape[1] - 1, -1, -1):
        carried = delta[:, step] + gamma * lam * carried
        out[:, step] = carried
    return out[values.mask()]


def _compact(column: Ragged, loss_mask: Ragged) -> Ragged:
    """The rows with only their tokens in the loss mask, in float64."""
    return Ragged(column.values[loss_mask.values].double(), offsets_of(loss_mask.sum()))


def _scatter(values: torch.Tensor, written: torch.Tensor, rows: Ragged) -> Ragged:
    out = values.new_zeros(len(written))
    out[written] = values
    return rows.like(out.float())


def _sum_by(index: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    return values.new_zeros(size).index_add(0, index, values)
