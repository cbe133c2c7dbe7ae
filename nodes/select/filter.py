"""Filters choose the rows that stay. A node that reads a filter's rows (``rows: NODE``) sees no others.
Whole groups are kept or dropped by ops with ``rows="group"``.
"""

from typing import Annotated

from pydantic import Field, NonNegativeFloat

from rlgraph.nodes.advantage.group import EQUAL, centred_by_group, deviation
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, boolean, float32, int64, op, samples


@op(filters=True)
def everything(group: int64[samples]) -> boolean[samples]:
    """Keep all samples: with ``refill``, after rollout.partial, only unfinished samples are left out.

    Partial rollouts without a filter on rewards, as in Kimi k1.5 (arXiv 2501.12599).

    Example:
        finished: {op: filter.all, refill: {rows: 8}}
    """
    return torch.ones_like(group, dtype=torch.bool)


@op(filters=True, rows="group")
def mixed(
    ctx: Context,
    rewards: float32[samples],
    group: int64[samples],
    *,
    min_std: NonNegativeFloat = 0.0,
) -> boolean[samples]:
    """Keep the groups whose rewards differ: the others have no advantage to learn from.

    A group is kept if the unbiased standard deviation of its rewards is above ``min_std``; a group of one is
    dropped. With ``refill: true`` it is DAPO's dynamic sampling (arXiv 2503.14476). Records ``kept``, the
    fraction of samples that are kept.

    Attributes:
        min_std: the standard deviation must be above this, in units of the reward, at least 0.

    Example:
        informative: {op: filter.mixed, refill: true}
    """
    centred, members, count = centred_by_group(rewards, group)
    std = deviation(centred, members, count, alone=0.0)
    is_kept = (std > max(min_std, EQUAL))[members]
    ctx.record("kept", is_kept, kind="share")
    return is_kept


@op(filters=True)
def threshold(ctx: Context, rewards: float32[samples], *, min: float) -> boolean[samples]:
    """Keep the samples whose reward is at least ``min``: rejection sampling, or best-of-n by a score.

    s >= min (RFT, arXiv 2308.01825). Records ``kept``, the fraction of samples that are kept.

    Attributes:
        min: the smallest reward that is kept.

    Example:
        correct: {op: filter.threshold, min: 1.0}
    """
    is_kept = rewards >= min
    ctx.record("kept", is_kept, kind="share")
    return is_kept


@op(filters=True, rows="all")
def widest(
    ctx: Context, rewards: float32[samples], group: int64[samples], *, groups: Annotated[int, Field(ge=1)]
) -> boolean[samples]:
    """Keep the ``groups`` groups whose rewards differ most, out of more than are needed.

    The groups with the largest sigma, the unbiased standard deviation of a group's rewards (0 for a group of
    one); among equals, the one with the lower number. sigma bounds what an update can gain from a prompt
    (arXiv 2504.03380). After a filter that refills, it chooses among the over-sampled groups and keeps an
    equally exact number. If there are fewer groups, all are kept. Records ``kept``, the fraction of samples
    that are kept.

    Attributes:
        groups: how many groups to keep, at least 1.

    Example:
        widest: {op: filter.widest, rows: informative, groups: 128}
    """
    centred, members, count = centred_by_group(rewards, group)
    std = deviation(centred, members, count, alone=0.0)
    std = std.masked_fill(std <= EQUAL, 0.0)
    best = torch.argsort(std, descending=True, stable=True)[:groups]
    is_kept = torch.isin(members, best)
    ctx.record("kept", is_kept, kind="share")
    return is_kept


@op(filters=True, rows="group", assumes=("groups",))
def best(ctx: Context, rewards: float32[samples], group: int64[samples]) -> boolean[samples]:
    """Keep the best sample of each group: best-of-n (RAFT, arXiv 2304.06767, algorithm 1).

    The one with the largest reward; among equals, the first. Records ``reward``, the mean reward of the kept
    samples.

    Example:
        best: {op: filter.best}
    """
    order = torch.argsort(rewards, descending=True, stable=True)
    order = order[torch.argsort(group[order], stable=True)]  # group by group, its best first
    groups = group[order]
    is_kept = torch.zeros(len(rewards), dtype=torch.bool)
    is_kept[order[groups.diff(prepend=groups[:1] - 1) != 0]] = True
    ctx.record("reward", rewards[is_kept])
    return is_kept


@op(filters=True)
def judged(ctx: Context, failed: boolean[samples]) -> boolean[samples]:
    """Keep the samples whose reward did not fail; this is how a graph drops the others (``on_error: drop``).

    It may cut groups: the rest of a group is a smaller group. Records ``kept``, the fraction of samples that
    are kept.

    Example:
        judged: {op: filter.judged}
    """
    ctx.record("kept", ~failed, kind="share")
    return ~failed
