"""Tool rollouts: conversations at the same time against one at a time.

    python benchmarks/tool_rollout.py

256 conversations of three turns and two calls; a call takes 50 ms, as a search over a network would. The same
op on the same engine, once with all of them and once with each alone. Every turn ends at its first token, so
that what is measured is the waiting, not the model. Target: at least 10 times faster.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.rollout import Conversations, agent
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Parser, Tool
from rlgraph.runtime.demo_tools import make_model
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

SAMPLES, TURNS, LATENCY, TARGET = 256, 3, 0.05, 10.0


async def look(words: str) -> str:
    """Look something up, far away."""
    await asyncio.sleep(LATENCY)
    return words


def calls(text: str) -> list[ToolCall]:
    """A call in every turn."""
    return [ToolCall("look", {"words": "x"})]


def converse(engine: TransformersEngine, rows: Sequence[int]) -> Conversations:
    """The conversations of some rows; the last turn's call is not run."""
    context = Context("rollout", seed=0, iteration=0, rows=rows, total_rows=SAMPLES)
    prompt = Ragged.of([[3, 10 + row % 200, 1, 4] for row in rows], torch.int64)
    parser, tools = Parser(calls, {}, {}), {"look": Tool(look, {}, {})}
    return agent(engine, context, prompt, max_new_tokens=64, max_turns=TURNS, parser=parser, tools=tools)


def main() -> None:
    """Print both times, their ratio and the target."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), seed=0)
        engine = TransformersEngine(folder)
        engine.load_pretrained()
    engine.stops = torch.arange(engine.model.config.vocab_size)
    converse(engine, range(SAMPLES))
    start = time.perf_counter()
    together = converse(engine, range(SAMPLES))
    middle = time.perf_counter()
    alone = [converse(engine, [row]) for row in range(SAMPLES)]
    end = time.perf_counter()
    same = together.tokens.tolist() == [ids for one in alone for ids in one.tokens.tolist()]
    ratio = (end - middle) / (middle - start)
    count = SAMPLES * (TURNS - 1)
    print(f"{SAMPLES} conversations, {count} calls of {LATENCY * 1000:.0f} ms, the same tokens: {same}")
    print(f"at the same time {middle - start:.2f} s, one at a time {end - middle:.2f} s")
    print(f"ratio {ratio:.1f}, target {TARGET:.0f}")
    sys.exit(ratio < TARGET or not same)


if __name__ == "__main__":
    main()
