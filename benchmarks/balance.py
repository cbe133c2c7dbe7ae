"""How evenly does a balanced layout spread rows over devices, and how long does that take?

    python benchmarks/balance.py [--share 4e-5] [--seed 0]

Prompts have 256 tokens, responses exponential lengths with a mean of 1,024, cut at 8,192. ``share`` is the
work of attention for a token and a column, over that of the weights: 4e-5 is Qwen3-8B. The bound is 1, or the
longest row over the mean of devices. The peer is the largest differencing method (Karmarkar and Karp, 1982;
for several bins Michiels et al., 2003), where that takes less than a second. The last column is how heavy
the busiest device is where rows are balanced by their tokens.
"""

from __future__ import annotations

import heapq
import platform
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import click
import numpy as np

from rlgraph.costs.workload import row_work
from rlgraph.runtime.columns.layouts import spread

SIZES = [(16, 2), (64, 8), (128, 8), (512, 8), (256, 64), (512, 64), (1024, 64), (1024, 128), (2048, 256)]
SIZES += [(8192, 256), (2048, 1024), (8192, 1024), (16384, 1024)]
MOST_DIFFERENCED = 600_000  # rows x devices
TARGET = 0.05  # seconds for the last of them
REPEATS = 5


@click.command()
@click.option("--share", default=4e-5, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(share: float, seed: int) -> None:
    print(f"python {platform.python_version()}, numpy {np.__version__}, share {share:g}, best of {REPEATS}")
    print("| rows | devices | bound | heaviest / mean | ms | differencing | ms | by tokens, heaviest work |")
    print("|---|---|---|---|---|---|---|---|")
    draw = np.random.default_rng(seed)
    for rows, devices in SIZES:
        tokens = 256 + np.minimum(draw.exponential(1024, rows), 8192).astype(np.int64)
        work = np.rint(row_work(tokens, tokens**2, share)).astype(np.int64)
        seconds, device = best(lambda w=work, d=devices: spread(w, d))
        bound = max(1.0, float(work.max()) * devices / float(work.sum()))
        ours, tokenwise = (heaviest(work, made, devices) for made in (device, spread(tokens, devices)))
        peer, took = differencing(work, devices) if rows * devices <= MOST_DIFFERENCED else ("-", "-")
        line = (f"{rows:,}", f"{devices:,}", f"{bound:.4f}", f"{ours:.4f}", f"{1e3 * seconds:.1f}")
        print(f"| {' | '.join((*line, peer, took, f'{tokenwise:.4f}'))} |")
    assert seconds < TARGET, f"{SIZES[-1]} took {seconds:.3f} s"


def best(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least seconds of some calls, and what the last returned."""
    least = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = call()
        least = min(least, time.perf_counter() - start)
    return least, result


def differencing(work: Any, devices: int) -> tuple[str, str]:
    """Return the peer's heaviest device over the mean, and its milliseconds, as text."""
    start = time.perf_counter()
    groups = karmarkar_karp(work.tolist(), devices)
    seconds = time.perf_counter() - start
    return f"{heaviest(work, numbered(groups, len(work)), devices):.4f}", f"{1e3 * seconds:.1f}"


def heaviest(work: Any, device: Any, devices: int) -> float:
    """Return the largest work of a device over the mean."""
    return float(np.bincount(device, work, devices).max() * devices / work.sum())


def numbered(groups: list[list[int]], rows: int) -> Any:
    """Return the group of each row: int64 ``[rows]``."""
    device = np.empty(rows, np.int64)
    for number, group in enumerate(groups):
        device[group] = number
    return device


def karmarkar_karp(weights: list[int], bins: int) -> list[list[int]]:
    """Split indices into ``bins`` by the largest differencing method."""
    order = count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, weight in enumerate(weights):
        heap.append((-weight, next(order), [(weight, [index])] + [(0, [])] * (bins - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        # the heaviest part of one meets the lightest of the other
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(order), merged))
    return [group for _, group in heap[0][2]]


if __name__ == "__main__":
    main()
