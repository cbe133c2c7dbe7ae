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
    """clip(factor (s + shift), low, high): an affine map of each reward, clipped to a range.

    The reward's bias, scaling and clip of AReaL (arXiv 2505.24298); to map rewards from the range a to b to
    the range c to d, set ``factor`` to (d - c) / (b - a), ``shift`` to c / factor - a, ``low`` to c and
    ``high`` to d. Records ``mean`` under the node's name.

    Attributes:
        shift: added to a reward, in its units.
        factor: the factor by which the sum is then multiplied.
        low: the lower bound of the result; null: no bound.
        high: the upper bound of the result; null: no bound.

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
    """(s - mu) / (sigma + eps): rewards centred and scaled, each over the group or over the whole batch.

    sigma is the unbiased standard deviation. With ``leave_one_out`` both are taken over the other samples
    only: the baseline of RLOO (arXiv 2402.14740), scaled. If sigma is 0, rewards are not divided; a group or
    batch of one has mu = 0, so its reward is unchanged. The mean of a group and the deviation of the batch
    give the advantage of arXiv 2508.08221: followed by ``reward.kl_penalty`` and ``advantage.reinforce_pp``
    with ``whiten: false``, it is one number per sample, minus the KL from each token on.

    Attributes:
        mean: what rewards are centred over: group, batch or none.
        std: what they are scaled over: group, batch or none.
        leave_one_out: whether a sample's own reward is left out of its mean and deviation.
        eps: added to the standard deviation, in units of the reward, above 0.

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
    """The reward of complete samples, and a fixed reward for samples that a limit cut off.

    Records ``share``, the fraction of samples that were cut off.

    Attributes:
        reward: the reward of a sample that a limit cut off.

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
