"""Ops of ``agent_streamed.yaml``: conversations of lengths of their own, and a tool that waits."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from rlgraph.nodes.agent.chat import Chat
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.ops import Context, TrainEngine, boolean, int64, op, prompt_tokens, prompts, samples, tokens


class Asked(NamedTuple):
    """The columns that ``asked`` writes."""

    prompt: int64[prompts, prompt_tokens]
    number: int64[prompts]


def add(file: str, **what: object) -> None:
    """Add a line to a file."""
    with Path(file).open("a") as lines:
        lines.write(json.dumps(what) + "\n")


def lines(file: str) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [*map(json.loads, Path(file).read_text().splitlines())]


@op(makes="prompts", rows="all", roles={"rows": "batch"})
def asked(ctx: Context, *, batch: int) -> Asked:
    """Prompts of a few tokens, and their numbers."""
    import torch

    from rlgraph.nodes.support.ragged import Ragged

    numbers = [*range(ctx.position, ctx.position + batch)]
    prompt = Ragged.of([[3, 20 + number % 40, 1, 4] for number in numbers], torch.int64)
    return Asked(prompt, torch.tensor(numbers, dtype=torch.int64))


class Visit:
    """Wait."""

    def __init__(
        self,
        number: int64[prompts],
        *,
        seconds: float = 0.002,
        note: str = "visits.jsonl",
        waits_for: str | None = None,
    ) -> None:
        self.number, self.seconds, self.note, self.visits = number, seconds, note, 0
        self.waits_for = waits_for if number == 0 else None

    def create(self) -> None:
        add(self.note, begins=self.number, worker=os.getpid())

    def execute(self, turns: int) -> str:
        time.sleep(self.seconds * (self.number * turns % 5))
        end = time.monotonic() + 25  # less than a call may take
        while self.waits_for and not Path(self.waits_for).exists():
            time.sleep(0.01)
            if time.monotonic() > end:
                add(self.note, late=self.number)
                break
        self.visits += 1
        return str(self.number)

    def reward(self) -> float:
        return float(self.visits)

    def release(self) -> None:
        add(self.note, ends=self.number)


async def walk(chat: Chat, number: int64[prompts], *, most: int = 8) -> None:
    """As many turns as the number says, few of many, with a visit behind each."""
    for turn in range(most if number % 7 == 0 else 1 + (number + chat.number) % 2):
        await chat.turn()
        await chat.use([ToolCall("visit", {"turns": turn})])


@op(filters=True, rows="group")
def some(group: int64[samples]) -> boolean[samples]:
    """Keep two groups of three."""
    return group % 3 != 1


@op(updates=True)
def used(model: TrainEngine, ctx: Context, group: int64[samples], *, note: str = "used.jsonl") -> None:
    """Note the rows, and make a version that is as good as the last."""
    add(note, iteration=ctx.iteration, groups=group.tolist())


@op(updates=True)
def train(
    model: TrainEngine,
    ctx: Context,
    group: int64[samples],
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    token_versions: int64[samples, tokens],
    turns: int64[samples],
    *,
    note: str = "used.jsonl",
) -> None:
    """Note the rows, and what drew them; make a version that is as good as the last."""
    assert ((token_versions.values >= 0) == loss_mask.values).all(), "what others wrote is of no version"
    drawn = [token_versions[row][loss_mask[row]].tolist() for row in range(len(group))]
    rows = {"groups": group.tolist(), "versions": drawn, "turns": turns.tolist(), "tokens": tokens.tolist()}
    add(note, iteration=ctx.iteration, **rows)
