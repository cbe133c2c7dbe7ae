"""Ops of ``agent_streamed.yaml``: conversations of lengths of their own, a tool that waits, and who has seen what."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from rlgraph.nodes.agent.chat import Chat
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.ops import Context, TrainEngine, boolean, int64, op, prompt_tokens, prompts, samples, tokens


class Asked(NamedTuple):
    """The columns that ``asked`` writes."""

    prompt: int64[prompts, prompt_tokens]
    number: int64[prompts]


def note(file: str, **what: object) -> None:
    with Path(file).open("a") as lines:
        lines.write(json.dumps(what) + "\n")


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

    def __init__(self, number: int64[prompts], *, seconds: float = 0.002, note: str = "visits.jsonl") -> None:
        self.number, self.seconds, self.note, self.visits = number, seconds, note, 0

    def create(self) -> None:
        note(self.note, begins=self.number, worker=os.getpid())

    def execute(self, turns: int) -> str:
        time.sleep(self.seconds * (self.number * turns % 5))
        self.visits += 1
        return str(self.number)

    def reward(self) -> float:
        return float(self.visits)

    def release(self) -> None:
        note(self.note, ends=self.number)


async def walk(chat: Chat, number: int64[prompts], *, most: int = 8) -> None:
    """As many turns as the number says, few of many, with a visit behind each."""
    for turn in range(most if number % 7 == 0 else 1 + (number + chat.number) % 2):
        await chat.turn()
        await chat.use([ToolCall("visit", {"turns": turn})])


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
    """Note the rows, and make a version that is as good as the last."""
    assert ((token_versions.values >= 0) == loss_mask.values).all(), "what others wrote is of no version"
    drawn = [token_versions[row][loss_mask[row]].tolist() for row in range(len(group))]
    with Path(note).open("a") as lines:
        used = {"iteration": ctx.iteration, "groups": group.tolist(), "versions": drawn}
        lines.write(json.dumps({**used, "turns": turns.tolist(), "tokens": tokens.tolist()}) + "\n")
