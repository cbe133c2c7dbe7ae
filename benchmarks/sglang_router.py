"""What does it bring to send a request to the server with the least to do, rather than to each in turn?

    PYTHONPATH=runtime/serve/sglang/cpu .sglang/bin/python benchmarks/sglang_router.py

Two SGLang servers on this host generate long and short samples in a random order, a few in flight on each at
a time. Once our router chooses, once the servers take turns.

Then the same conversations of several turns, once by their key and once without one: how much of the prompts
is computed again.

Covered: two servers that share the cores of one host. Not covered: GPUs, and SGLang's own router, which is a
server of its own and sees nothing of versions and sleep.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import sglang
from sglang_model import save_model

from rlgraph.engines import Request, Sampling
from rlgraph.runtime.serve.sglang.calls import Ask
from rlgraph.runtime.serve.sglang.engine import SglangEngine
from rlgraph.runtime.serve.sglang.router import Router
from rlgraph.runtime.serve.sglang.samples import body

SHORT, LONG = 8, 128  # tokens


class Turns(Router):
    """Each server in turn, whatever it has to do."""

    at = 0

    def take(self, conversation: str | None = None) -> int | None:
        """The next server; None while it is full."""
        server = self.at % len(self.loads)
        if self.loads[server] >= self.limit:
            return None
        self.at += 1
        self.loads[server] += 1
        return server


def ask(engine: SglangEngine, tokens: Sequence[int], length: int, conversation: str | None = None) -> Ask:
    """A sample of exactly so many tokens."""
    asked = body(Request(tokens, [0]), 0, Sampling(length, 0.0), [])
    asked["sampling_params"]["ignore_eos"] = True
    return Ask(asked, conversation, {engine.version})


def generate(engine: SglangEngine, lengths: Sequence[int]) -> float:
    """Seconds until all samples of these lengths are there."""
    asks = [ask(engine, [2 + index, 7, 9], length) for index, length in enumerate(lengths)]
    start = time.perf_counter()
    engine.calls.run(asks)
    return time.perf_counter() - start


def converse(engine: SglangEngine, talks: int, turns: int, keyed: bool) -> float:
    """The share of prompt tokens that servers had to compute, over conversations of several turns."""
    told = {talk: [2 + talk, *range(100, 164)] for talk in range(talks)}
    order, computed, whole = [*told], 0, 0
    for _ in range(turns):
        asks = [ask(engine, told[talk], 16, str(talk) if keyed else None) for talk in order]
        for talk, reply in zip(order, engine.calls.run(asks), strict=True):
            whole += len(told[talk])
            computed += len(told[talk]) - reply["meta_info"]["cached_tokens"]
            told[talk] += [*reply["output_ids"], *range(200, 232)]
        order = [*order[1:], order[0]]  # users do not come in the order of servers
    return computed / whole


@click.command()
@click.option("--requests", default=48, show_default=True, help="One in four is long.")
@click.option("--limit", default=4, show_default=True, help="Requests in flight on a server.")
@click.option("--repeats", default=3, show_default=True, help="Timed runs of each.")
def main(requests: int, limit: int, repeats: int) -> None:
    """Compare our router with servers that take turns."""
    lengths = [LONG if index % 4 == 0 else SHORT for index in range(requests)]
    random.Random(0).shuffle(lengths)
    with tempfile.TemporaryDirectory() as path:
        save_model(path, 128, 2)
        engines = [
            SglangEngine(path, logs=Path(path, "logs"), devices=[core], max_rows=limit) for core in ("0", "1")
        ]
        for engine in engines:
            engine.load_pretrained()
        both = engines[0]
        both.reach([engine.keeper.client for engine in engines])
        taken: dict[str, list[float]] = {"in turn": [], "least loaded": []}
        for repeat in range(repeats + 1):
            for name, kind in (("in turn", Turns), ("least loaded", Router)):
                both.calls.router = kind(2, limit)
                time_taken = generate(both, lengths)
                if repeat:
                    taken[name].append(time_taken)
        both.calls.router = Router(2, 64)
        shares = {}
        for name, keyed in (("without a key", False), ("by conversation", True)):
            for engine in engines:
                engine.keeper.client.flush()
            shares[name] = converse(both, 9, 4, keyed)
        for engine in engines:
            engine.close()
    print(
        f"sglang {sglang.__version__}, two servers, {requests} requests of {LONG} and {SHORT} tokens (1 : 3)"
    )
    medians = {name: statistics.median(found) for name, found in taken.items()}
    for name, median in medians.items():
        print(f"  {name:16} {median:8.2f} s")
    print(f"  ratio            {medians['least loaded'] / medians['in turn']:8.2f}")
    print("9 conversations of 4 turns: prompt tokens that were computed")
    for name, share in shares.items():
        print(f"  {name:16} {share:8.0%}")


if __name__ == "__main__":
    main()
