"""Metrics that an evaluation reports beside a plain mean: per source of its questions, and of k tries.

eval:
  nodes:
    rollout: {n: 16, temperature: 0.7}
    solved:  {op: metric.pass_at_k, k: 8}
  report: {pass@8: solved}              # eval/pass@8, and eval/pass@8/SOURCE of each source
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import comb
from typing import Annotated

from pydantic import Field

from rlgraph.errors import RunError
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, anything, float32, int64, op, samples, text


@op(rows="group", assumes=("tries",))
def pass_at_k(
    ctx: Context,
    rewards: float32[samples],
    group: int64[samples],
    source: text[samples] | None,
    *,
    k: Annotated[int, Field(ge=1)],
    threshold: float = 0.5,
) -> float32[samples]:
    """The probability that at least one of ``k`` samples solves a question, on each sample of the question.

    For n samples, c of which have a reward above ``threshold``: pass@k = 1 - C(n - c, k) / C(n, k), which is
    unbiased (arXiv 2107.03374, equation 1). Records ``NODE/SOURCE``, the mean over the questions of each
    source; an evaluation that reports this column reports them too.

    Attributes:
        k: the number of tries, from 1 to the number of samples per question.
        threshold: a sample with a reward above this counts as solved.

    Example:
        solved: {op: metric.pass_at_k, k: 8}
    """
    tried = torch.bincount(group)[group]
    solved = torch.bincount(group[rewards > threshold], minlength=int(group.max()) + 1)[group]
    if tried.min() < k:
        law = f"{ctx.node}: k is {k}, and a question has {int(tried.min())} samples"
        raise RunError(f"{law}; raise the rollout's n, or lower k")
    counts = zip(tried.tolist(), solved.tolist(), strict=True)
    values = torch.tensor([estimate(n, c, k) for n, c in counts], dtype=torch.float32)
    _record(ctx, values, source)
    return values


@op(rows="each")
def mean_at_k(ctx: Context, rewards: anything[samples], source: text[samples] | None) -> float32[samples]:
    """The rewards themselves, or other numbers or truth values; with ``n: k`` their mean is mean@k.

    Records ``NODE/SOURCE``, the mean over the samples of each source; an evaluation that reports this column
    reports them too. With ``in: {rewards: truncated}`` it is the share of each source's samples that are cut
    off.

    Example:
        average: {op: metric.mean_at_k}
    """
    if isinstance(rewards, list):
        law = "a mean is of numbers or truth values; map `rewards` to another column by `in`"
        raise RunError(f"{ctx.node}: {law}")
    values: torch.Tensor = rewards.float()
    _record(ctx, values, source)
    return values


@cache
def estimate(tried: int, solved: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k).

    Example:
        >>> estimate(4, 1, 2), estimate(4, 3, 2), estimate(4, 0, 2)
        (0.5, 1.0, 0.0)
    """
    return 1 - comb(tried - solved, k) / comb(tried, k)


def _record(ctx: Context, values: torch.Tensor, source: Sequence[str] | None) -> None:
    for name, value in zip(source or (), values.tolist(), strict=source is not None):
        ctx.record(f"{ctx.node}/{name}", value)
