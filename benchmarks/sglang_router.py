"""What does it bring to send a request to the server with the least to do, rather than to each in turn?

    PYTHONPATH=runtime/engines/sglang/cpu .sglang/bin/python benchmarks/sglang_router.py

Two SGLang servers on this host, each pinned to a core of its own, generate samples whose lengths nobody knows
beforehand, so many in flight on each at a time. Once each server takes every second request, whatever it has
to do; once our router chooses. Beside the whole time stands when each server was done.

batch       samples of prompts, all of one prompt after one another, as an iteration asks for them. Samples of
            a prompt are about as long, and some prompts take eight times as long as others. In turn, each
            server gets half of every prompt, so there is little to gain: what decides is a long sample that
            begins late.
by turns    one sample per prompt of two data sets by turns, one with long answers, one with short ones, as an
            evaluation asks for them. In turn, one server gets all that are long.

Then the same conversations of several turns, once by their key and once without one: how much of the prompts
is computed again.

Covered: two servers of the same speed. Not covered: GPUs, and SGLang's own router, which is a server of its
own and sees nothing of versions and sleep.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import click
import sglang
from sglang_model import save_model

from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.servers.router import Router
from rlgraph.runtime.engines.servers.sample_request import SampleRequest
from rlgraph.runtime.engines.sglang.client import body
from rlgraph.runtime.engines.sglang.engine import SglangEngine

SAMPLES = 8  # of a prompt
MIDDLES, SPREAD = (12, 24, 96), 0.5  # of a prompt's samples: the median in tokens, and how its log varies
SHORT, LONG, LONGEST = 16, 128, 192  # tokens


class Watched(Router):
    """Notes when each server was answered last."""

    def __init__(self, servers: int, limit: int) -> None:
        """As a router."""
        super().__init__(servers, limit)
        self.last = [time.perf_counter()] * servers

    def give_back(self, server: int) -> None:
        """As a router."""
        super().give_back(server)
        self.last[server] = time.perf_counter()


def batch(prompts: int) -> list[int]:
    """Lengths of the samples of an iteration."""
    source, found = random.Random(0), list[int]()
    for _ in range(prompts):
        middle = math.log(source.choice(MIDDLES))
        found += [min(LONGEST, 1 + int(source.lognormvariate(middle, SPREAD))) for _ in range(SAMPLES)]
    return found


def ask(
    engine: SglangEngine, tokens: Sequence[int], length: int, conversation: str | None = None
) -> SampleRequest:
    """A sample of exactly so many tokens."""
    asked = body(Request(tokens, [0]), 0, Sampling(length, 0.0), [])
    asked["sampling_params"]["ignore_eos"] = True
    return SampleRequest(asked, conversation, {engine.version})


def generate(engines: Sequence[SglangEngine], lengths: Sequence[int]) -> list[float]:
    """Seconds until each server is done; several engines take the samples in turn."""
    start, made = time.perf_counter(), []
    with ThreadPoolExecutor(len(engines)) as pool:
        for index, engine in enumerate(engines):
            engine.calls.router = Watched(len(engine.calls.clients), engine.max_rows)
            own = [*enumerate(lengths)][index :: len(engines)]
            asks = [ask(engine, [2 + number % 4000, 7, 9], length) for number, length in own]
            made.append(pool.submit(engine.calls.run, asks))
    for one in made:
        one.result()
    return [last - start for engine in engines for last in engine.calls.router.last]


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


@contextmanager
def servers(path: str, limit: int) -> Iterator[list[SglangEngine]]:
    """Two engines, each with a server that has a core of its own."""
    cores, made = os.sched_getaffinity(0), list[SglangEngine]()
    for core in sorted(cores)[:2]:
        os.sched_setaffinity(0, {core})  # which a server inherits
        made.append(SglangEngine(path, logs=Path(path, "logs"), devices=[str(core)], max_rows=limit))
        made[-1].load_pretrained()
    os.sched_setaffinity(0, cores)
    yield made
    for engine in made:
        engine.close()


def compare(engines: Sequence[SglangEngine], both: SglangEngine, lengths: list[int], repeats: int) -> None:
    """Print what both ways take."""
    taken: dict[str, list[list[float]]] = {"in turn": [], "least loaded": []}
    for repeat in range(repeats + 1):
        for name, those in (("in turn", engines), ("least loaded", [both])):
            made = generate(those, lengths)
            if repeat:
                taken[name].append(made)
    middle = {name: statistics.median(map(max, found)) for name, found in taken.items()}
    for name, found in taken.items():
        each = " and ".join(f"{statistics.median(one):.2f}" for one in zip(*found, strict=True))
        print(f"  {name:16} {middle[name]:8.2f} s   its servers {each} s")
    print(f"  ratio            {middle['least loaded'] / middle['in turn']:8.2f}")


@click.command()
@click.option("--prompts", default=24, show_default=True, help="Of the batch, 8 samples each.")
@click.option("--evaluated", default=96, show_default=True, help="Prompts of two data sets by turns.")
@click.option("--limit", default=8, show_default=True, help="Requests in flight on a server.")
@click.option("--repeats", default=3, show_default=True, help="Timed runs of each.")
def main(prompts: int, evaluated: int, limit: int, repeats: int) -> None:
    """Compare our router with servers that take turns."""
    print(f"sglang {sglang.__version__}, two servers, {limit} samples in flight on each, median of {repeats}")
    with tempfile.TemporaryDirectory() as path:
        save_model(path, 128, 2)
        with servers(path, limit) as engines:
            clients = [engine.supervisor.client for engine in engines]
            both = SglangEngine(path, servers=clients, leads=False, max_rows=limit)
            lengths = batch(prompts)
            print(f"batch: {prompts} prompts, {SAMPLES} samples of each, {sum(lengths):,} tokens")
            compare(engines, both, lengths, repeats)
            lengths = [SHORT if index % 2 else LONG for index in range(evaluated)]
            print(f"by turns: {evaluated} samples of {LONG} and {SHORT} tokens")
            compare(engines, both, lengths, repeats)
            both.calls.router = Router(2, 64)
            print("9 conversations of 4 turns: prompt tokens that were computed")
            for name, keyed in (("without a key", False), ("by conversation", True)):
                for client in clients:
                    client.flush()
                print(f"  {name:16} {converse(both, 9, 4, keyed):8.0%}")
            both.close()


if __name__ == "__main__":
    main()
