"""Advantage estimators that compare the samples of one prompt: one number per sample, over its loss mask.

s is a sample's reward, mu and sigma the mean and the unbiased standard deviation of its group. A group is the
rows with one value of ``group``, as many as are there: one that a filter cut is a smaller group. A group of
one has nothing to be compared with: its baseline is 0 and its sigma 1. All are 0 outside the loss mask.
Sums run in float64, so that the order of rows doesn't show in float32.
"""

from __future__ import annotations

import functools
from typing import Literal

from pydantic import PositiveFloat

from rlgraph.nodes.advantage.gae import whitened
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import boolean, float32, int64, op, prompts, samples, text, tokens

EQUAL = 1e-6  # float32 sums tell no closer rewards apart
OTHERS = {"rewards_2": "weight_2", "rewards_3": "weight_3", "rewards_4": "weight_4"}
EPS = {"eps": "scale"}


@op(rows="group", assumes=("groups",), when=EPS)
def grpo(
    rewards: float32[samples],
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    scale: bool = True,
    eps: PositiveFloat = 1e-6,
) -> float32[samples, tokens]:
    """Group-relative advantages (GRPO, arXiv 2402.03300): one number per sample, over its loss mask.

    A = (s - mu) / (sigma + eps), mu and sigma the mean and the unbiased standard deviation of the rewards of
    one prompt's samples. A group of one has mu = 0 and sigma = 1. Without ``scale``, A = s - mu (Dr. GRPO,
    arXiv 2503.20783). 0 where ``loss_mask`` is false.

    Attributes:
        scale: whether to divide by the standard deviation.
        eps: added to the standard deviation, in units of the reward, above 0.

    Example:
        advantages: {op: advantage.grpo}
    """
    per_sample = _normalised(rewards, group, eps) if scale else centred_by_group(rewards, group)[0]
    return loss_mask.where_true(per_sample)


@op(rows="group", assumes=("groups",))
def rloo(
    rewards: float32[samples], group: int64[samples], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """Leave-one-out advantages (RLOO, arXiv 2402.14740): a sample's reward minus the mean of its peers'.

    A = n / (n - 1) (s - mu), n the number of samples in the group; that is s minus the mean of the others.
    In a group of one, A = s. 0 where ``loss_mask`` is false.

    Example:
        advantages: {op: advantage.rloo}
    """
    centred, members, count = centred_by_group(rewards, group)
    return loss_mask.where_true(centred * (count / (count - 1).clamp(min=1))[members])


@op(rows="group", assumes=("groups",))
def maxrl(
    rewards: float32[samples], group: int64[samples], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """Maximum-likelihood RL (MaxRL, arXiv 2602.02710): rarely solved prompts count for more.

    A = (s - mu) / mu where mu is above 0, else 0. With rewards of 0 and 1 this gives the gradient of log p,
    where p is a prompt's share of right samples, as far as n samples allow: that of -sum_{k < n} (1 - p)^k /
    k. By comparison, s - mu gives the gradient of p itself. 0 for a group of one, and where ``loss_mask`` is
    false.

    Example:
        advantages: {op: advantage.maxrl}
    """
    members, count = _groups(group)
    scores = rewards.double()
    mean = (_sum_by(members, scores, count) / count)[members]
    return loss_mask.where_true(torch.where(mean > EQUAL, (scores - mean) / mean, 0))


@op(rows="all", assumes=("groups",))
def reinforce_pp_baseline(
    rewards: float32[samples], group: int64[samples], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): centred by group, scaled by the whole batch.

    A = whiten(s - mu), whiten(x) = (x - mean) / sqrt(unbiased variance + 1e-8) over all tokens in the loss
    mask, so a long sample counts for more than a short one. A group of one has mu = 0. 0 where ``loss_mask``
    is false.

    Example:
        advantages: {op: advantage.reinforce_pp_baseline}
    """
    return whitened(loss_mask.spread(centred_by_group(rewards, group)[0]), loss_mask)


@op(rows="group", assumes=("groups",))
def opo(
    rewards: float32[samples], group: int64[samples], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """Advantages over the optimal baseline (OPO, arXiv 2505.23585): rewards weighted by length.

    A = s - sum(len s) / sum(len), summed over the group, where len is the number of a sample's tokens in the
    loss mask. This is the baseline of least variance if a gradient's squared norm grows in proportion to the
    length. The baseline is 0 in a group of one, and in a group without tokens in its loss mask. 0 where
    ``loss_mask`` is false.

    Example:
        advantages: {op: advantage.opo}
    """
    members, count = _groups(group)
    scores, lengths = rewards.double(), loss_mask.sum().double()
    weights = _sum_by(members, lengths, count)
    baseline = _sum_by(members, lengths * scores, count) / weights.clamp(min=1)
    return loss_mask.where_true(scores - baseline.masked_fill(count == 1, 0.0)[members])


@op(rows="all", assumes=("groups",))
def gpg(
    rewards: float32[samples],
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    f_norm: PositiveFloat = 1.0,
    counted: Literal["gradient", "reward"] = "gradient",
) -> float32[samples, tokens]:
    """Group policy gradient (GPG, arXiv 2504.02546): centred rewards, scaled up for samples without gradient.

    A = (samples / samples where s - mu is not 0) (s - mu) / f_norm, counted over the whole batch: groups of
    equal rewards give no gradient, and would otherwise dilute the mean. With ``counted: reward`` the samples
    where s is not 0 are counted, as in verl 0.9.1; these are different samples unless rewards are 0 and 1. A
    group of one has mu = 0. A is 0 everywhere if no sample has a gradient. 0 where ``loss_mask`` is false.

    Attributes:
        f_norm: the number by which advantages are divided, in units of the reward, above 0.
        counted: which samples the scale counts: gradient, those where s - mu is not 0; reward, those where s
            is not 0.

    Example:
        advantages: {op: advantage.gpg}
    """
    centred, _, _ = centred_by_group(rewards, group)
    felt = (rewards != 0) if counted == "reward" else (centred.abs() > EQUAL)
    return loss_mask.where_true(centred * len(centred) / felt.sum().clamp(min=1) / f_norm)


@op(rows="group", assumes=("groups",), when=EPS)
def grpo_passk(
    rewards: float32[samples],
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    scale: bool = True,
    eps: PositiveFloat = 1e-6,
) -> float32[samples, tokens]:
    """Pass@k advantages (arXiv 2503.19595): only the best sample of a group has one.

    A = (r_1 - r_2) / (sigma + eps) for the sample with the largest reward r_1, r_2 the second largest of its
    group, and 0 for the others: a leave-one-out baseline of the group's maximum, since leaving out any other
    sample does not change the maximum. If several samples share the largest reward, r_1 = r_2 and no sample
    has an advantage. A group of one has r_2 = 0 and sigma = 1. sigma is the group's unbiased standard
    deviation; without ``scale`` nothing is divided, as in the paper. 0 where ``loss_mask`` is false.

    Attributes:
        scale: whether to divide by the standard deviation.
        eps: added to the standard deviation, in units of the reward, above 0.

    Example:
        advantages: {op: advantage.grpo_passk}
    """
    centred, members, count = centred_by_group(rewards, group)
    scores = rewards.double()
    largest = _largest(scores, members, len(count))
    best = scores == largest[members]
    second = _largest(scores.masked_fill(best, -torch.inf), members, len(count))
    winners = torch.bincount(members[best], minlength=len(count))
    margin = (largest - second.masked_fill(count == 1, 0.0)).masked_fill(winners > 1, 0.0)
    if scale:
        margin = margin / (deviation(centred, members, count, alone=1.0) + eps)
    return loss_mask.where_true(torch.where(best, margin[members], 0))


@op(rows="all", assumes=("groups",), when=OTHERS)
def gdpo(
    rewards: float32[samples],
    rewards_2: float32[samples] | None,
    rewards_3: float32[samples] | None,
    rewards_4: float32[samples] | None,
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    weight: float = 1.0,
    weight_2: float = 1.0,
    weight_3: float = 0.0,
    weight_4: float = 0.0,
    eps: PositiveFloat = 1e-6,
    over: Literal["tokens", "samples"] = "tokens",
) -> float32[samples, tokens]:
    """Decoupled normalisation of several rewards (GDPO, arXiv 2601.05242).

    A = whiten(sum_k w_k (s_k - mu_k) / (sigma_k + eps)), mu_k and sigma_k those of reward k in the group, as
    in advantage.grpo. If rewards were added before they are normalised, samples that earned the same sum in
    different ways would get equal advantages. whiten(x) = (x - mean) / sqrt(unbiased variance + 1e-8) over
    all tokens in the loss mask of the batch; ``over: samples`` takes mean and deviation over samples, as the
    paper does, and divides by (standard deviation + eps). A group of one has mu = 0 and sigma = 1; a batch of
    one has an advantage of 0. 0 where ``loss_mask`` is false. A reward of weight 0 is not read.

    Attributes:
        weight: of ``rewards``.
        weight_2: of ``rewards_2``.
        weight_3: of ``rewards_3``.
        weight_4: of ``rewards_4``.
        eps: added to each standard deviation, in units of its reward, above 0.
        over: whether the sum is whitened over all tokens of the loss mask or over samples, each counted once.

    Example:
        advantages: {op: advantage.gdpo, in: {rewards_2: formatted}, weight_2: 0.5}
    """
    columns = [(rewards, weight), (rewards_2, weight_2), (rewards_3, weight_3), (rewards_4, weight_4)]
    weighted = []
    for column, factor in columns:
        if column is not None:
            weighted.append(factor * _normalised(column, group, eps))
    per_sample = functools.reduce(torch.add, weighted)
    if over == "tokens":
        return whitened(loss_mask.spread(per_sample), loss_mask)
    centred = per_sample - per_sample.mean()
    spread = centred.std() if len(centred) > 1 else 1.0
    return loss_mask.spread((centred / (spread + eps)).float())


def _groups(group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each sample's group, counted from 0, ``[samples]``, and each group's samples ``[groups]``."""
    _, members, count = torch.unique(group, return_inverse=True, return_counts=True)
    return members, count


@op(rows="group")
def group_mean(values: float32[samples], group: int64[samples]) -> float32[prompts]:
    """The mean of a number over the samples of each prompt: for rewards of 0 and 1, the share of 1.

    Example:
        solved: {op: group.mean, in: {values: rewards}}
    """
    members, count = _groups(group)
    return (_sum_by(members, values.double(), count) / count).float()


@op(rows="group")
def group_peer(
    rewards: float32[samples], responses: text[samples], group: int64[samples], *, least: float = 1.0
) -> text[samples]:
    """The best response among the other samples of the prompt, as a hint; empty if none is good enough.

    Of the other samples of a group, the first with the largest reward, if that is at least ``least`` (arXiv
    2601.20802, for rewards without feedback).

    Attributes:
        least: the smallest reward with which a response is shown to others.

    Example:
        peers: {op: group.peer}
    """
    best: dict[int, list[int]] = {}  # group -> its rows by reward: two are enough, as one may be the reader's
    for row in rewards.argsort(descending=True, stable=True).tolist():
        if rewards[row] >= least:
            best.setdefault(int(group[row]), []).append(row)
    hints = []
    for row, number in enumerate(group.tolist()):
        peers = [peer for peer in best.get(number, [])[:2] if peer != row]
        hints.append(responses[peers[0]] if peers else "")
    return hints


def centred_by_group(
    rewards: torch.Tensor, group: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return s - mu in float64 ``[samples]``, mu 0 for a group of one; and ``_groups``."""
    members, count = _groups(group)
    scores = rewards.double()
    mean = (_sum_by(members, scores, count) / count).masked_fill(count == 1, 0.0)
    return scores - mean[members], members, count


def deviation(
    centred: torch.Tensor, members: torch.Tensor, count: torch.Tensor, alone: float
) -> torch.Tensor:
    """Return each group's unbiased standard deviation ``[groups]``; ``alone`` for a group of one."""
    std = (_sum_by(members, centred.square(), count) / (count - 1).clamp(min=1)).sqrt()
    return std.masked_fill(count == 1, alone)


def _sum_by(members: torch.Tensor, values: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return each group's sum ``[groups]`` of values ``[samples]``."""
    return values.new_zeros(len(count)).index_add(0, members, values)


def _normalised(rewards: torch.Tensor, group: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (s - mu) / (sigma + eps) of the sample's group, in float64 ``[samples]``."""
    centred, members, count = centred_by_group(rewards, group)
    return centred / (deviation(centred, members, count, alone=1.0)[members] + eps)


def _largest(scores: torch.Tensor, members: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the largest score of each group ``[groups]``."""
    return scores.new_full((groups,), -torch.inf).scatter_reduce(0, members, scores, "amax")
