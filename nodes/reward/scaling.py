"""Rewards per sample on another scale: affine, whitened, and of samples that were cut off."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from rlgraph.nodes.advantage.group import EQUAL, centred_by_group
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, boolean, float32, int64, op, samples

Over = Literal["group", "batch", "none"]


@op()
def scale(
    ctx: Context,
    rewards: float32[samples],
    *,
    shift: float = 0.0,
    factor: float = 1.0,
    low: float | None = None,
    high: float | None = None,
) -> float32[samples]:
    """clip(factor (s + shift), low, high): an affine map of each reward, cut to a range.

    The reward's bias, scaling and clip of AReaL (arXiv 2505.24298); of rewards from a to b, which are to be
    from c to d, ``factor`` is (d - c) / (b - a), ``shift`` c / factor - a, ``low`` c and ``high`` d. Records
    ``mean`` under the node's name.

    Attributes:
        shift: what is added to a reward, in its units.
        factor: what it is multiplied by then.
        low: the least that comes out; null for no bound.
        high: the most that comes out; null for no bound.

    Example:
        scaled: {op: reward.scale, shift: -0.5, factor: 10, low: -20, high: 20}
    """
    out = (rewards.double() + shift) * factor
    if low is not None:
        out = out.clamp(min=low)
    if high is not None:
        out = out.clamp(max=high)
    ctx.record("mean", out)
    return out.float()


@op(rows="all")
def whiten(
    rewards: float32[samples],
    group: int64[samples],
    *,
    mean: Over = "batch",
    std: Over = "batch",
    leave_one_out: bool = False,
    eps: PositiveFloat = 1e-6,
) -> float32[samples]:
    """(s - mu) / (sigma + eps): rewards that are centred and scaled, each over a group or the whole batch.

    sigma is the unbiased standard deviation. With ``leave_one_out`` both are of the other samples alone: the
    baseline of RLOO (arXiv 2402.14740), scaled. Where sigma is 0 nothing is divided; a group, or a batch, of
    one has mu = 0, and so is left alone. The mean of a group and the deviation of the batch are the advantage
    of arXiv 2508.08221: with ``reward.kl_penalty`` and ``advantage.reinforce_pp`` behind it,
    ``whiten: false``, it is one number per sample, less a KL from each token on.

    Attributes:
        mean: over what rewards are centred: group, batch or none.
        std: over what they are scaled: group, batch or none.
        leave_one_out: whether a sample's own reward is left out of its mean and deviation.
        eps: what is added to the standard deviation, in units of the reward, above 0.

    Example:
        normal: {op: reward.whiten, mean: group, std: batch}
    """
    out = rewards.double()
    if mean != "none":
        out = out - _mean(rewards, _of(group, mean), leave_one_out)
    if std != "none":
        sigma = _deviation(rewards, _of(group, std), leave_one_out)
        out = torch.where(sigma > EQUAL, out / (sigma + eps), out)
    return out.float()


@op()
def cut_off(
    ctx: Context, rewards: float32[samples], truncated: boolean[samples], *, reward: float = 0.0
) -> float32[samples]:
    """The reward of samples that came to their end, and another one for those that a limit cut off.

    Records ``share``, the fraction of samples that were cut off.

    Attributes:
        reward: what a sample gets that a limit cut off.

    Example:
        ended: {op: reward.truncated, reward: 0}
    """
    ctx.record("share", truncated, kind="share")
    return torch.where(truncated, reward, rewards).to(rewards.dtype)


def _of(group: torch.Tensor, over: Over) -> torch.Tensor:
    """Return the number of what each sample is compared with ``[samples]``: its group, or one batch."""
    return group if over == "group" else torch.zeros_like(group)


def _mean(rewards: torch.Tensor, group: torch.Tensor, leave_one_out: bool) -> torch.Tensor:
    """Return what each reward is centred by, in float64 ``[samples]``; 0 where there is no other."""
    centred, members, count = centred_by_group(rewards, group)
    mean = rewards.double() - centred
    if not leave_one_out:
        return mean
    peers = (count - 1)[members]
    return torch.where(peers > 0, mean - centred / peers.clamp(min=1), 0)


def _deviation(rewards: torch.Tensor, group: torch.Tensor, leave_one_out: bool) -> torch.Tensor:
    """Return the unbiased standard deviation for each sample, in float64 ``[samples]``; 0 of one number."""
    centred, members, count = centred_by_group(rewards, group)
    centred = torch.where(count[members] == 1, 0, centred)
    squares = centred.new_zeros(len(count)).index_add(0, members, centred.square())[members]
    numbers = count[members]
    if leave_one_out:
        # of the others: their sum is -centred, as all together sum to 0
        numbers = numbers - 1
        squares = squares - centred.square() - centred.square() / numbers.clamp(min=1)
    return (squares.clamp(min=0) / (numbers - 1).clamp(min=1)).sqrt()
