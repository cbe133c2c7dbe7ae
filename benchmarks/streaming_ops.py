"""Ops that wait instead of computing, for ``streaming.py``: what remains is when rows move.

A sample has a length of its own, log-normal and cut at ``tail`` times the median. ``slots`` of them run at a
time, each a token in ``seconds``; the others wait for a place, as in continuous batching.
"""

import math
import time
from typing import NamedTuple

from rlgraph.ops import Context, ServeEngine, TrainEngine, float32, int64, op, prompts, samples

CUT = 2.326  # standard deviations from the median to the 99th percentile


class Drawn(NamedTuple):
    """The columns that ``draw`` writes."""

    length: int64[samples]
    group: int64[samples]


@op(makes="prompts", rows="all", roles={"rows": "batch"})
def numbers(ctx: Context, *, batch: int) -> int64[prompts]:
    """Row numbers."""
    import torch

    return torch.arange(ctx.position, ctx.position + batch)


def length(number: int, sample: int, median: int, tail: float) -> int:
    """The tokens of a sample of a prompt: the same in every run."""
    import numpy

    spread = math.log(tail) / CUT
    drawn = numpy.random.default_rng((number, sample)).lognormal(math.log(median), spread)
    return max(1, round(min(drawn, median * tail)))


@op(makes="samples", times="n", rows="each", leaves=1)
def draw(
    model: ServeEngine,
    ctx: Context,
    numbers: int64[prompts],
    *,
    n: int,
    median: int,
    tail: float,
    slots: int,
    seconds: float,
    chunk: int | None = None,
) -> Drawn:
    """``n`` samples of each number, after as long as their tokens take."""
    import numpy
    import torch

    known = numbers.tolist()
    total = [length(number, k, median, tail) for number in known for k in range(n)]
    done = [*(ctx.begun[0].tolist() if ctx.begun else []), *[0] * len(total)][: len(total)]
    left = [whole - part for whole, part in zip(total, done, strict=True)]
    budget = chunk if chunk and ctx.resumes else sum(left)
    passed, running, queue, start = 0, {}, [i for i, rest in enumerate(left) if rest], time.monotonic()
    while passed < budget and (queue or running) and not (passed and ctx.is_due()):
        while queue and len(running) < slots:
            place = queue.pop(0)
            running[place] = left[place]
        passed += 1
        time.sleep(max(start + passed * seconds - time.monotonic(), 0))
        for place in [*running]:
            running[place] -= 1
            left[place] -= 1
            if not running[place]:
                del running[place]
    groups = [left[i * n : i * n + n] for i in range(len(known))]
    whole = [i for i, group in enumerate(groups) if not any(group)]
    if ctx.resumes:
        begun = [i * n + k for i, group in enumerate(groups) if any(group) for k in range(n)]
        rest = [total[j] - left[j] for j in begun]
        ctx.leave(numpy.array(whole, numpy.int64), torch.tensor(rest, dtype=torch.int64))
    rows = [(total[i * n + k], known[i]) for i in whole for k in range(n)]
    return Drawn(*(torch.tensor([row[at] for row in rows], dtype=torch.int64) for at in (0, 1)))


@op(beside=True)
def judge(length: int64[samples], *, seconds: float) -> float32[samples]:
    """A reward, after a while."""
    time.sleep(seconds)
    return length.float()


@op(updates=True)
def train(model: TrainEngine, judged: float32[samples], *, seconds: float) -> None:
    """Nothing, after a while."""
    time.sleep(seconds)
