"""What does packing save? An update of the demo model on groups of samples, rows packed or beside each other.

    OMP_NUM_THREADS=1 python benchmarks/packing.py [--rounds 9]

Groups are 32 prompts x 8 samples. Beside each other, rows of like length share a micro-batch and are padded
to its longest; packed, they lie end to end and the samples of a prompt read it once (``train.packing``). Both
run in turn, on one thread, measured in CPU seconds; the ratio is that of the medians. The bound is the ratio
of the tokens that the two read, padding included: what would be saved if a token cost the same in both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.demo import make_model
from rlgraph.runtime.engines.fsdp.batching import micro_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

GROUPS, SAMPLES = 32, 8
# tokens of a prompt; least and most of a response; tokens of a micro-batch
SETTINGS = {
    "short responses": (6, 3, 4, 16384),
    "ragged responses": (6, 2, 61, 16384),
    "ragged, small micro-batches": (6, 2, 61, 1024),
    "long prompts": (40, 4, 20, 16384),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        make_model(Path(folder, "model"), seed=0)
        print(f"torch {torch.__version__}, {GROUPS} x {SAMPLES} samples, 1 thread, median of {rounds}")
        for name, (prompt, least, most, tokens) in SETTINGS.items():
            compare(name, batch(prompt, least, most), f"{folder}/model", tokens, rounds)
        dist.destroy_process_group()


def batch(prompt: int, least: int, most: int) -> dict[str, Ragged]:
    """Samples of each prompt, of any length from ``least`` to ``most``."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 30, (count,), generator=draw).tolist()

    rows, mask = [], []
    for _ in range(GROUPS):
        question = tokens(prompt)
        for _ in range(SAMPLES):
            answer = tokens(int(torch.randint(least, most + 1, (1,), generator=draw)))
            rows.append(question + answer)
            mask.append([False] * prompt + [True] * len(answer))
    return {"tokens": Ragged.of(rows, torch.int64), "loss_mask": Ragged.of(mask, torch.bool)}


def compare(name: str, columns: dict[str, Ragged], model: str, tokens: int, rounds: int) -> None:
    """Rounds of one setting, and their ratio."""
    engines = [
        FsdpEngine.of(model, optimizer={"lr": 1e-6}, micro_tokens=tokens, packing=packing)
        for packing in (False, True)
    ]
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for engine, taken in zip(engines, times, strict=True):
            taken.append(seconds(engine, columns))
    beside, packed = (1000 * statistics.median(taken[1:]) for taken in times)
    read = [
        sum(b.inputs["input_ids"].numel() for b in micro_batches(columns, e.budget, e.device))
        for e in engines
    ]
    print(
        f"  {name:<28} beside {beside:6.1f} ms, packed {packed:6.1f} ms: ratio {beside / packed:.2f}", end=""
    )
    print(f"  (bound {read[0] / read[1]:.2f}: {read[0]:,} and {read[1]:,} tokens)")


def seconds(engine: FsdpEngine, columns: dict[str, Ragged]) -> float:
    """CPU seconds of an update."""
    rows = torch.arange(GROUPS * SAMPLES)
    start = time.process_time()
    engine.update(columns, objective, rows, len(rows))
    return time.process_time() - start


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    """The mean log-prob of a token."""
    return -batch["logprobs"].values.sum() / totals.tokens, {}


if __name__ == "__main__":
    main()
