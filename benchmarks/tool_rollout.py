"""Tool rollouts: conversations at the same time against one at a time, and a slow tool in a stream.

    python benchmarks/tool_rollout.py

256 conversations of three turns and two calls; a call takes 50 ms, as a search over a network would. The same
op on the same engine, once with all of them and once with each alone. Every turn ends at its first token, so
that what is measured is the waiting, not the model. Target: at least 10 times faster.

Then rounds as of a stream: 16 groups of four conversations of four turns are under way, and one call in ten
takes 2 s. Once where conversations wait for each other, as with
``order: in_order``, and once where they do not.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.rollout import Conversations, agent
from rlgraph.nodes.rollout.sampling import Grammar, ResponseLimits, SamplingAttributes
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Parser, Tool
from rlgraph.runtime.demo_tools import make_model
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

SAMPLES, TURNS, LATENCY, TARGET = 256, 3, 0.05, 10.0
GROUPS, N, UNDER_WAY, SLOW, SHARE = 64, 4, 16, 2.0, 0.1


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
    limits = ResponseLimits(max_new_tokens=64)
    sampling, grammar = SamplingAttributes(), Grammar()
    return agent(
        engine,
        context,
        prompt,
        limits=limits,
        sampling=sampling,
        grammar=grammar,
        max_turns=TURNS,
        parser=parser,
        tools=tools,
    )


def stream(engine: TransformersEngine, yields: bool) -> tuple[float, float]:
    """Make rounds until enough groups have ended; return samples and tokens per second."""
    chance, session, rows, begun = random.Random(0), dict[str, Any](), list[int](), list[Any]()
    new, ended, tokens, start = iter(range(10**9)), 0, 0, time.perf_counter()

    async def sometimes(words: str) -> str:
        """Look something up, which takes long now and then."""
        await asyncio.sleep(SLOW if chance.random() < SHARE else 0.0)
        return words

    parser, tools = Parser(calls, {}, {}), {"look": Tool(sometimes, {}, {})}
    while ended < GROUPS:
        rows += [next(new) for _ in range(UNDER_WAY - len(rows))]
        context = Context("rollout", 0, 0, rows=rows, session=session, resumes=True, begun=begun)
        context.yields = yields
        prompt = Ragged.of([[3, 10 + row % 200, 1, 4] for row in rows], torch.int64)
        out = agent(
            engine,
            context,
            prompt,
            limits=ResponseLimits(n=N, max_new_tokens=400),
            sampling=SamplingAttributes(),
            grammar=Grammar(),
            max_turn_tokens=64,
            max_turns=TURNS + 1,
            chunk=16,
            parser=parser,
            tools=tools,
        )
        ended, tokens = ended + len(context.whole), tokens + int(out.loss_mask.values.sum())
        done = {rows[place] for place in context.whole}
        rows, begun = [row for row in rows if row not in done], [*context.left]
    seconds = time.perf_counter() - start
    session["live"].close()
    return ended * N / seconds, tokens / seconds


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
    engine.stops = torch.tensor([1, *range(8, 288, 8)])
    print(f"one call in ten takes {SLOW:.0f} s")
    for name, yields in (("wait for each other", False), ("do not", True)):
        samples, tokens = stream(engine, yields)
        print(f"conversations {name}: {samples:.1f} samples/s, {tokens:.0f} tokens/s")
    sys.exit(ratio < TARGET or not same)


if __name__ == "__main__":
    main()
