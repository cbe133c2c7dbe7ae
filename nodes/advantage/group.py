"""Advantage estimators that compare the samples of one prompt: one number per sample, over its loss mask.

s is a sample's reward, mu and sigma the mean and the unbiased standard deviation of its group. A group is the
rows with one value of ``group``, as many as are there: one that a filter cut is a smaller group. A group of
one has nothing to be compared with: its baseline is 0 and its sigma 1. All are 0 outside the loss mask.

Shapes: ``[samples, tokens]`` is a ``Ragged`` column. Sums run in float64, so that the order of rows doesn't
show in float32.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlgraph.nodes.advantage.gae import whitened
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import boolean, float32, int64, op, samples, tokens

EQUAL = 1e-6  # in reward; float32 sums tell no closer rewards apart


@op(rows="group", assumes=("groups",))
def grpo(
    rewards: float32[samples],
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    scale: bool = True,
    eps: Annotated[float, Field(gt=0)] = 1e-6,
) -> float32[samples, tokens]:
    """Group-relative advantages (GRPO, arXiv 2402.03300): one number per sample, over its loss mask.

    A = (s - mu) / (sigma + eps), mu and sigma the mean and the unbiased standard deviation of the rewards of
    one prompt's samples. A group of one has mu = 0 and sigma = 1. Without ``scale``, A = s - mu (Dr. GRPO,
    arXiv 2503.20783). 0 where ``loss_mask`` is false.

    Attributes:
        scale: whether to divide by the standard deviation.
        eps: what is added to the standard deviation, in units of the reward, above 0.

    Example:
        advantages: {op: advantage.grpo}
    """
    centred, members, count = centred_by_group(rewards, group)
    if scale:
        centred = centred / (deviation(centred, members, count).masked_fill(count == 1, 1.0)[members] + eps)
    return _over_tokens(centred, loss_mask)


@op(rows="group", assumes=("groups",))
def rloo(
    rewards: float32[samples], group: int64[samples], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """Leave-one-out advantages (RLOO, arXiv 2402.14740): a sample's reward less the mean of its peers'.

    A = n / (n - 1) (s - mu), n the samples of the group; that is s less the mean of the other n - 1. A group
    of one keeps s. 0 where ``loss_mask`` is false.

    Example:
        advantages: {op: advantage.rloo}
    """
    centred, members, count = centred_by_group(rewards, group)
    return _over_tokens(centred * (count / (count - 1).clamp(min=1))[members], loss_mask)


@op(rows="all", assumes=("groups",))
def reinforce_pp_baseline(
    rewards: float32[samples], group: int64[samples], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): centred by group, scaled by the whole batch.

    A = whiten(s - mu), whiten(x) = (x - mean) / sqrt(unbiased variance + 1e-8) over all tokens in the loss
    mask, so that a long sample counts for more than a short one. A group of one has mu = 0. 0 where
    ``loss_mask`` is false.

    Example:
        advantages: {op: advantage.reinforce_pp_baseline}
    """
    return whitened(loss_mask.spread(centred_by_group(rewards, group)[0]), loss_mask)


@op(rows="group", assumes=("groups",))
def opo(
    rewards: float32[samples], group: int64[samples], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """Advantages over the optimal baseline (OPO, arXiv 2505.23585): rewards weighted by length.

    A = s - sum(len s) / sum(len), sums over the group, len the tokens of a sample in the loss mask: the
    baseline of least variance where a gradient's squared norm grows as the length. The baseline is 0 in a
    group of one, and in one without a token in its loss mask. 0 where ``loss_mask`` is false.

    Example:
        advantages: {op: advantage.opo}
    """
    members, count = _groups(group)
    scores, lengths = rewards.double(), loss_mask.sum().double()
    weights = _sum_by(members, lengths, count)
    baseline = _sum_by(members, lengths * scores, count) / weights.clamp(min=1)
    return _over_tokens(scores - baseline.masked_fill(count == 1, 0.0)[members], loss_mask)


@op(rows="all", assumes=("groups",))
def gpg(
    rewards: float32[samples],
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    f_norm: Annotated[float, Field(gt=0)] = 1.0,
) -> float32[samples, tokens]:
    """Group policy gradient (GPG, arXiv 2504.02546): centred rewards, made up for samples without gradient.

    A = (samples / samples where s - mu is not 0) (s - mu) / f_norm, counted over the whole batch: groups of
    equal rewards give no gradient, and would otherwise thin the mean. A group of one has mu = 0. All 0 where
    no sample has a gradient. 0 where ``loss_mask`` is false.

    Attributes:
        f_norm: what advantages are divided by, in units of the reward, above 0.

    Example:
        advantages: {op: advantage.gpg}
    """
    centred, _, _ = centred_by_group(rewards, group)
    felt = (centred.abs() > EQUAL).sum().clamp(min=1)
    return _over_tokens(centred * len(centred) / felt / f_norm, loss_mask)


def _groups(group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each sample's group, counted from 0, ``[samples]``, and each group's samples ``[groups]``."""
    _, members, count = torch.unique(group, return_inverse=True, return_counts=True)
    return members, count


def centred_by_group(
    rewards: torch.Tensor, group: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return s - mu in float64 ``[samples]``, mu 0 for a group of one; and ``_groups``."""
    members, count = _groups(group)
    scores = rewards.double()
    mean = (_sum_by(members, scores, count) / count).masked_fill(count == 1, 0.0)
    return scores - mean[members], members, count


def deviation(centred: torch.Tensor, members: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return each group's unbiased standard deviation ``[groups]``, of values less their group mean."""
    return (_sum_by(members, centred.square(), count) / (count - 1).clamp(min=1)).sqrt()


def _over_tokens(per_sample: torch.Tensor, loss_mask: Ragged) -> Ragged:
    """Spread a number per sample ``[samples]`` over its tokens in the loss mask, 0 on the others: float32."""
    return loss_mask.like(torch.where(loss_mask.values, loss_mask.spread(per_sample).values, 0).float())


def _sum_by(members: torch.Tensor, values: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return each group's sum ``[groups]`` of values ``[samples]``."""
    return values.new_zeros(len(count)).index_add(0, members, values)
