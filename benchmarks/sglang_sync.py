"""How fast do weights reach an SGLang server, and how long does it take to sleep and wake?

    PYTHONPATH=runtime/engines/sglang/cpu .sglang/bin/python benchmarks/sglang_sync.py

A random Qwen2 in float32 (bfloat16 on a GPU) is sent to a server of the same host as an engine does: in
buckets of bounded size, through shared memory or CUDA IPC, then broadcast, then by files. Beside them stands
a plain copy of the same bytes, in the same process. On a GPU the memory that sleeping frees is measured too,
as the driver counts it.

Covered: one server, one device. Not covered: tensor parallelism, several hosts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import sglang
import torch
from sglang_model import save_model

from rlgraph.runtime.engines.sglang.engine import SglangEngine

Weights = dict[str, torch.Tensor]


def seconds(action: Callable[[], object], repeats: int) -> float:
    """The median time of an action, after one run to warm up."""
    taken = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if repeat:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def plain_copy(weights: Weights) -> Callable[[], None]:
    """The same bytes to memory that is there."""
    there = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            there[name].copy_(tensor)

    return copy


@contextmanager
def other(engine: SglangEngine, folder: str | None) -> Iterator[SglangEngine]:
    """An engine that reaches the same server by its address."""
    made = SglangEngine(
        engine.path,
        engine.device,
        str(engine.dtype).removeprefix("torch."),
        servers=[engine.supervisor.client],
        transport="disk" if folder else "broadcast",
        sync_folder=folder,
    )
    yield made
    made.close()


def compare_syncs(engine: SglangEngine, weights: Weights, repeats: int) -> None:
    """Print what each way takes."""
    size = sum(tensor.nbytes for tensor in weights.values())
    plain = seconds(plain_copy(weights), repeats)
    print(f"  plain copy        {plain * 1e3:9.1f} ms  {size / plain / 1e9:7.2f} GB/s")
    with (
        tempfile.TemporaryDirectory() as folder,
        other(engine, None) as sends,
        other(engine, folder) as files,
    ):
        for name, one in (("shared memory", engine), ("broadcast", sends), ("files", files)):
            taken = seconds(lambda one=one: one.load_weights(weights.items(), 1), repeats)
            rate = f"{size / taken / 1e9:7.2f} GB/s  {plain / taken:5.2f} of a copy"
            print(f"  {name:16}  {taken * 1e3:9.1f} ms  {rate}")


def free_memory() -> int:
    """Bytes of the GPU that nobody holds; 0 where there is none."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def measure_sleep(engine: SglangEngine, weights: Weights, repeats: int) -> None:
    """Print what it takes to sleep and wake, and what it frees."""
    for parts in (["kv"], ["kv", "weights"]):
        slept, woken, freed = [], [], 0
        for _ in range(repeats):
            before, start = free_memory(), time.perf_counter()
            engine.sleep(parts)
            slept.append(time.perf_counter() - start)
            freed, start = free_memory() - before, time.perf_counter()
            engine.wake(parts)
            woken.append(time.perf_counter() - start)
            if "weights" in parts:
                engine.load_weights(weights.items(), 1)
        times = (
            f"sleep {statistics.median(slept) * 1e3:7.1f} ms, wake {statistics.median(woken) * 1e3:7.1f} ms"
        )
        memory = f", frees {freed / 2**20:,.0f} MiB" if torch.cuda.is_available() else ""
        print(f"  {' and '.join(parts):16}  {times}{memory}")


@click.command()
@click.option(
    "--hidden", default=1024, show_default=True, help="The model's width; its size goes by the square."
)
@click.option("--layers", default=8, show_default=True, help="Its layers.")
@click.option("--repeats", default=5, show_default=True, help="Timed runs of each.")
def main(hidden: int, layers: int, repeats: int) -> None:
    """Measure syncs, sleep and wake."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as path:
        model = save_model(path, hidden, layers).to(device, getattr(torch, dtype))
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        size = sum(tensor.nbytes for tensor in weights.values())
        print(f"sglang {sglang.__version__}, torch {torch.__version__}, {device}, median of {repeats}")
        print(f"{size / 2**20:,.0f} MiB of {dtype} in {len(weights)} tensors")
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # a copy takes all of them too
        devices = [cores] if device == "cpu" else ["0"]
        engine = SglangEngine(path, device, dtype, logs=Path(path, "logs"), devices=devices)
        compare_syncs(engine, weights, repeats)
        measure_sleep(engine, weights, repeats)
        engine.close()


if __name__ == "__main__":
    main()
