"""How many bytes of a weight sync have changed since the last: the demo's GRPO at several learning rates.

    python benchmarks/delta_sync.py [--iterations 20]

Two pools; weights are served in bfloat16, or in float32. What is sent is the share of the bytes of all
weights: places and bits of those that changed, or whole tensors where these are fewer bytes. Then: how many
bytes of weights per second of a thread both ends go through, where two of a hundred change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from rlgraph.runtime.demo import make
from rlgraph.runtime.engines.weights.delta import Delta
from rlgraph.runtime.engines.weights.transfer import Weights
from rlgraph.runtime.engines.weights.transports import Handover
from rlgraph.runtime.run import run_graph

RATES = (1e-6, 3e-6, 1e-5, 2e-4)
SPLIT = "pools={train: {devices: 1}, gen: {devices: 1}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=20)
    count = parser.parse_args().iterations
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make("demo_files")
        run_graph("demo_sft", [], run_dir=Path("runs/demo_sft"), inline=True)
        lines = []
        for dtype in ("bfloat16", "float32"):
            for rate in RATES:
                sent = measure(dtype, rate, count)
                lines.append(
                    f"  {dtype:<9} learning rate {rate:<7g} {sent:6.1%} of the bytes, {1 / sent:5.1f} x"
                )
    print(f"\nmedian of {count} syncs\n" + "\n".join(lines))
    print("  {:.2f} GB/s are sent and {:.2f} GB/s received".format(*speed()))


def speed(numbers: int = 1 << 24, repeats: int = 5) -> list[float]:
    """Return the billion bytes of weights that each end goes through per second of its thread, at best."""
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(0)
    way, weight, best = Handover(), torch.randn(numbers, generator=made).bfloat16(), [1e9, 1e9]
    ends = Delta(way), Delta(way)
    for version in range(repeats + 1):
        weight = torch.where(torch.rand(numbers, generator=made) < 0.02, float(version), weight)
        ends[0].send(Weights(version, [("a", weight.bfloat16())]))
        start = time.thread_time()
        sent = [*way.receive(version).tensors]
        middle = time.thread_time()
        way.send(Weights(version, sent))
        list(ends[1].receive(version).tensors)
        if version:
            took = middle - start, time.thread_time() - middle
            best = [*map(min, best, took)]
    return [2 * numbers / seconds / 1e9 for seconds in best]


def measure(dtype: str, rate: float, count: int) -> float:
    """Return the median share of bytes that is sent, once the first sync is over."""
    settings = [SPLIT, f"models.policy.serve={{sync: delta, dtype: {dtype}}}"]
    settings += [f"models.policy.optimizer={{lr: {rate}, schedule: constant}}"]
    settings += [f"schedule={{iterations: {count}, save_every: 0}}", "eval.before=false"]
    run = run_graph("demo", settings, run_dir=Path(f"{dtype}-{rate}"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["sync/sent"] for line in lines[2:])


if __name__ == "__main__":
    main()
