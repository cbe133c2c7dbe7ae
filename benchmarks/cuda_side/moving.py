"""Bytes on their way: offloaded and back, to a serve engine in another process, gathered, and to disk."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.cuda_side.bench import BIG, Bench, Record, Records

from rlgraph.costs.model_size import size_of
from rlgraph.runtime.engines.memory.offload import Residency

STUB = Path(__file__).parents[2] / "tests" / "cuda" / "stub"  # a server that keeps SGLang's rules, see there
PIECE = 2**28  # bytes of one tensor


def offload(bench: Bench) -> Records:
    """An optimizer's memory to the host and back; the first time takes the host's memory too."""
    for whole in (2**32, 5 * 2**32):
        total = bench.size(whole, whole >> 12)
        piece = min(PIECE, total)
        tensors = [torch.randn(piece // 4, device=bench.device) for _ in range(total // piece)]
        residency = Residency("benchmark", bench.device, {"optimizer": lambda tensors=tensors: tensors})
        first = bench.once(partial(residency.offload, ["optimizer"]))
        back = bench.once(partial(residency.reload, ["optimizer"]))
        residency.changed(["optimizer"])
        again = bench.once(partial(residency.offload, ["optimizer"]))
        size = f"{total / 2**30:.3g} GiB"
        out, home = bench.found["to the host"], bench.found["from the host"]
        work = {"kind": "move", "bytes": total}
        yield Record(f"offload: {size}, the first", total / first, "B/s", "pinned copy", out)
        yield Record(
            f"offload: {size}", total / again, "B/s", "pinned copy", out, ">= 0.8", {**work, "seconds": again}
        )
        yield Record(
            f"load: {size}", total / back, "B/s", "pinned copy", home, ">= 0.8", {**work, "seconds": back}
        )
        del tensors, residency
        bench.clear()


def gather(bench: Bench) -> Records:
    """Two ways to gather a bucket, on one rank: what the collective itself copies and holds."""
    count = bench.size(2**26, 2**16)
    own = torch.randn(count, device=bench.device)
    ranks = own.new_empty(1, count)
    ways = {
        "into one tensor": lambda: dist.all_gather_into_tensor(ranks.view(-1), own),
        "a list": lambda: dist.all_gather(list(ranks.unbind(0)), own),
    }
    rates = {name: 4 * count / bench.seconds(way, repeats=5) for name, way in ways.items()}
    one = rates["into one tensor"]
    yield Record("gather: into one tensor", one, "B/s", "a list of tensors", rates["a list"])


def save(bench: Bench) -> Records:
    """How long a checkpoint stops training: the copy to the host; the disk is written meanwhile."""
    with bench.engine(BIG) as engine:
        total = 12 * sum(parameter.numel() for parameter in engine.parameters)
        engine.begin_save(str(bench.folder / "saved"))  # the averages and the host's memory are there then
        engine.finish_save()
        taken = bench.once(lambda: engine.begin_save(str(bench.folder / "saved")))
        engine.finish_save()
    yield Record(
        "save: begin_save", total / taken, "B/s", "pinned copy", bench.found["to the host"], ">= 0.2"
    )


def sync(bench: Bench) -> Records:
    """All weights from the train engine into a server's memory: gathered, flattened, sent, copied."""
    if find_spec("aiohttp") is None:
        raise LookupError("aiohttp, by which servers are spoken to, is not installed")
    from rlgraph.costs import limits

    before = limits.BUCKET
    with bench.engine(BIG) as engine:
        total = sum(2 * tensor.numel() for _, tensor in engine.weights())
        config = size_of(engine.path).config.model_dump(exclude_defaults=True)
        for restarts in (0, 3):
            with _server(bench, restarts) as server:
                for bucket in (2**28, 2**30):
                    limits.BUCKET = bucket
                    server.load_weights(engine.weights(), 0)
                    taken = bench.once(lambda server=server: server.load_weights(engine.weights(), 1))
                    label = f"sync: buckets of {bucket >> 20} MiB, restarts {restarts}"
                    work = {"kind": "sync", "seconds": taken, "config": config}
                    yield Record(label, total / taken, "B/s", "a copy", bench.found["copy"], "", work)
    limits.BUCKET = before


@contextmanager
def _server(bench: Bench, restarts: int) -> Iterator[Any]:
    """The serve engine with a server of its own, which takes weights as SGLang does and computes nothing."""
    if str(STUB) not in sys.path:
        sys.path.insert(0, str(STUB))
    own = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STUB), own])
    from rlgraph.runtime.engines.sglang.engine import SglangEngine

    options = {"logs": bench.folder / "logs", "restarts": restarts}
    made = SglangEngine(str(bench.model(BIG)), bench.device.type, "bfloat16", **options)
    try:
        yield made
    finally:
        made.close()
        os.environ["PYTHONPATH"] = own
        time.sleep(0.1)
        bench.clear()
