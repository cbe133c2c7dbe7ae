"""Ops of ``streamed.yaml``: samples of lengths of their own, and an update that notes whose rows it has."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlgraph.ops import (
    Context,
    ServeEngine,
    TrainEngine,
    boolean,
    float32,
    int64,
    op,
    prompts,
    samples,
    text,
    tokens,
)


class Drawn(NamedTuple):
    """The columns that ``draw`` writes."""

    length: int64[samples]
    group: int64[samples]
    versions: int64[samples]


def length(number: int, sample: int, longest: int) -> int:
    """The tokens of a sample, of which a tenth has the most."""
    drawn = np.random.default_rng((number, sample)).random()
    return longest if drawn < 0.1 else 1 + int(drawn * longest / 4)


@op(makes="prompts", rows="all", roles={"rows": "batch"})
def numbers(ctx: Context, *, batch: int) -> int64[prompts]:
    """Row numbers."""
    import torch

    return torch.arange(ctx.position, ctx.position + batch)


@op(makes="samples", times="n", rows="each", leaves=2)
def draw(
    model: ServeEngine,
    ctx: Context,
    numbers: int64[prompts],
    *,
    n: int,
    longest: int,
    seconds: float = 0.0,
    chunk: int | None = None,
) -> Drawn:
    """``n`` samples of each number, at most ``chunk`` tokens of each in a round."""
    import torch

    known = numbers.tolist()
    assert known == [*ctx.rows], "rows are numbered by their prompts"
    total = [length(number, k, longest) for number in known for k in range(n)]
    begun = zip(*(column.tolist() for column in ctx.begun), strict=True) if ctx.begun else ()
    done = [*begun, *[(0, model.version)] * len(total)][: len(total)]
    now = [min(whole, part + (chunk or whole)) for whole, (part, _) in zip(total, done, strict=True)]
    time.sleep(seconds)
    groups = [[i * n + k for k in range(n)] for i in range(len(known))]
    whole = [i for i, group in enumerate(groups) if all(now[j] == total[j] for j in group)]
    if ctx.resumes:
        rest = [j for i, group in enumerate(groups) if i not in {*whole} for j in group]
        kept = [now[j] for j in rest], [done[j][1] for j in rest]
        ctx.leave(np.array(whole, np.int64), *(torch.tensor(column, dtype=torch.int64) for column in kept))
    rows = [(total[j], known[i], done[j][1]) for i in whole for j in groups[i]]
    return Drawn(*(torch.tensor([row[at] for row in rows], dtype=torch.int64) for at in range(3)))


@op(beside=True)
def judge(length: int64[samples], *, seconds: float = 0.0) -> float32[samples]:
    """A reward, after a while."""
    time.sleep(seconds)
    return length.float()


@op(filters=True, rows="group")
def some(judged: float32[samples], group: int64[samples]) -> boolean[samples]:
    """Keep two groups of three."""
    return group % 3 != 1


@op(filters=True, rows="each")
def few(numbers: int64[prompts]) -> boolean[prompts]:
    """Keep two prompts of three."""
    return numbers % 3 != 1


@op(updates=True)
def train(
    model: TrainEngine,
    ctx: Context,
    judged: float32[samples],
    group: int64[samples],
    versions: int64[samples],
    *,
    seconds: float = 0.0,
    note: str = "used.jsonl",
) -> None:
    """Note the rows, and make a version that is as good as the last."""
    time.sleep(seconds)
    write(note, ctx, group, versions.tolist())


@op(beside=True)
def ones(responses: text[samples], *, seconds: float = 0.0) -> float32[samples]:
    """A quarter of the number of ones in a response, after a while."""
    import torch

    time.sleep(seconds)
    return torch.tensor([response.count("1") / 4 for response in responses], dtype=torch.float32)


@op()
def noted(
    ctx: Context,
    group: int64[samples],
    token_versions: int64[samples, tokens],
    old_logprobs: float32[samples, tokens],
    *,
    note: str = "used.jsonl",
) -> float32[samples, tokens]:
    """Note the rows of an update, which have the log-probs of now; their weights are one."""
    versions = [[version for version in row if version >= 0] for row in token_versions.tolist()]
    write(note, ctx, group, [min(row) for row in versions])
    return old_logprobs.like((token_versions.values >= 0).float())


def write(note: str, ctx: Context, group: Any, versions: list[int]) -> None:
    """Add a line to what ``test_stream.used`` reads: whose rows an update has, and of which weights."""
    used = {"iteration": ctx.iteration, "groups": group.tolist(), "versions": versions}
    with Path(note).open("a") as file:
        file.write(json.dumps(used) + "\n")
