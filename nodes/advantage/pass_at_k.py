"""Advantages for being right at least once in several samples.

Shapes: ``[samples, tokens]`` is a ``Ragged`` column. Groups are those of ``rlgraph.nodes.advantage.group``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlgraph.nodes.advantage.group import centred_by_group, deviation
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import boolean, float32, int64, op, samples, tokens


@op(rows="group", assumes=("groups",))
def grpo_passk(
    rewards: float32[samples],
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    scale: bool = True,
    eps: Annotated[float, Field(gt=0)] = 1e-6,
) -> float32[samples, tokens]:
    """Pass@k advantages (arXiv 2503.19595): only the best sample of a group gets any.

    A = (r_1 - r_2) / (sigma + eps) for the sample with the largest reward r_1, r_2 the second largest of its
    group, and 0 for the others: a leave-one-out baseline of the group's maximum, as without any other sample
    the maximum stays. Where several share the largest reward, r_1 = r_2 and all have 0. A group of one has
    r_2 = 0 and sigma = 1. sigma is the group's unbiased standard deviation; without ``scale`` it is left
    out, as in the paper. 0 where ``loss_mask`` is false.

    Attributes:
        scale: whether to divide by the standard deviation.
        eps: what is added to the standard deviation, in units of the reward, above 0.

    Example:
        advantages: {op: advantage.grpo_passk}
    """
    centred, members, count = centred_by_group(rewards, group)
    scores = rewards.double()
    first = _largest(scores, members, len(count))
    best = scores == first[members]
    second = _largest(scores.masked_fill(best, -torch.inf), members, len(count))
    winners = torch.bincount(members[best], minlength=len(count))
    margin = (first - second.masked_fill(count == 1, 0.0)).masked_fill(winners > 1, 0.0)
    if scale:
        margin = margin / (deviation(centred, members, count).masked_fill(count == 1, 1.0) + eps)
    per_sample = torch.where(best, margin[members], 0).float()
    return loss_mask.like(loss_mask.spread(per_sample).values * loss_mask.values)


def _largest(scores: torch.Tensor, members: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the largest score of each group ``[groups]``."""
    return scores.new_full((groups,), -torch.inf).scatter_reduce(0, members, scores, "amax")
