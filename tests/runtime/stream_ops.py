"""Ops of ``streamed.yaml``: samples of lengths of their own, and an update that notes whose rows it has.

Behind them are those that take their time: rollouts that go on until a round is due to end, a late reward.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
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


@op(makes="prompts", rows="all", roles={"rows": "batch"})
def few_numbers(ctx: Context, *, batch: int) -> int64[prompts]:
    """Row numbers, at last fewer than asked for."""
    import torch

    return torch.arange(ctx.position, ctx.position + (batch if ctx.position < 32 else batch // 2))


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
    stays: bool = False,
) -> Drawn:
    """``n`` samples of each number, at most ``chunk`` tokens of each in a round; no metric tells how many."""
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


@op(makes="samples", times="n", rows="each", leaves=2)
def draw_by_token(
    model: ServeEngine,
    ctx: Context,
    numbers: int64[prompts],
    *,
    n: int,
    longest: int,
    note: str,
    seconds: float = 0.002,
    chunk: int | None = None,
    stays: bool = False,
) -> Drawn:
    """``n`` samples of each number, ``chunk`` tokens of each in a round, or fewer where it is due to end."""
    import torch

    known = numbers.tolist()
    total = [length(number, k, longest) for number in known for k in range(n)]
    begun = zip(*(column.tolist() for column in ctx.begun), strict=True) if ctx.begun else ()
    done = [*begun, *[(0, model.version)] * len(total)][: len(total)]
    has = [part for part, _ in done]
    passed = 0
    while known and passed < (chunk or longest) and not (passed and ctx.is_due()):
        time.sleep(seconds)
        passed += 1
        has = [min(part + 1, whole) for part, whole in zip(has, total, strict=True)]
    ctx.record("tokens/generated", sum(has) - sum(part for part, _ in done), kind="sum", over="tokens")
    groups = [[i * n + k for k in range(n)] for i in range(len(known))]
    whole = [i for i, group in enumerate(groups) if all(has[j] == total[j] for j in group)]
    rest = [j for i, group in enumerate(groups) if i not in {*whole} for j in group]
    kept = [has[j] for j in rest], [done[j][1] for j in rest]
    ctx.leave(np.array(whole, np.int64), *(torch.tensor(column, dtype=torch.int64) for column in kept))
    fresh = [number for number, at in zip(known, groups, strict=True) if not done[at[0]][0]]
    line = {"process": os.getpid(), "begun": fresh, "ended": [known[i] for i in whole], "drawn": passed}
    with Path(note).open("a") as file:
        file.write(json.dumps(line) + "\n")
    rows = [(total[j], known[i], done[j][1]) for i in whole for j in groups[i]]
    return Drawn(*(torch.tensor([row[at] for row in rows], dtype=torch.int64) for at in range(3)))


def wait(is_there: Callable[[], bool], what: str) -> None:
    """Wait for something that comes, unless what is tested holds it up."""
    end = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.002)


@op(makes="samples", times="n", rows="each", leaves=2)
def draw_until_due(
    model: ServeEngine, ctx: Context, numbers: int64[prompts], *, n: int, chunk: int | None = None
) -> Drawn:
    """``n`` samples of each number; half of the numbers need a second round, until that is due."""
    import torch

    known = numbers.tolist()
    before = len(ctx.begun[0]) // n if ctx.begun else 0
    if before:
        wait(ctx.is_due, "weights that end the round")
    whole = [i for i, number in enumerate(known) if i < before or number % 16 < 8]
    rest = [model.version for i in range(len(known)) if i not in {*whole} for _ in range(n)]
    ctx.leave(np.array(whole, np.int64), *(torch.tensor(rest, dtype=torch.int64) for _ in range(2)))
    first = [*(ctx.begun[0].tolist()[::n] if before else []), *[model.version] * len(known)]
    rows = [(1, known[i], first[i]) for i in whole for _ in range(n)]
    return Drawn(*(torch.tensor([row[at] for row in rows], dtype=torch.int64) for at in range(3)))


@op(beside=True)
def judge_late(length: int64[samples], *, note: str) -> float32[samples]:
    """A reward, once generation has gone on."""
    wait(lambda: len(Path(note).read_text().splitlines()) > 1, "second round")
    return length.float()
