"""The time and the memory of an optimizer step by Muon, as ratios to AdamW's in the same run.

    python benchmarks/muon.py [--ranks 2] [--hidden 512] [--layers 4] [--dtype float32]

The train engine holds a Llama of random weights over gloo ranks, with random gradients. The optimizers step
one after the other; times are medians of the slowest rank. Memory is that of the averages, as the engine
holds them and as planned: the script ends with 1 where these differ by more than 2 %. A step is a part of an
update, and takes the same time for any number of tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM

from rlgraph.compiler import compile_graph
from rlgraph.costs.dtypes import MASTER
from rlgraph.costs.model_size import size_of
from rlgraph.costs.optimizers import averages_on_device
from rlgraph.runtime.demo import make_tokenizer
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.shards import local

KINDS = "adamw", "muon"
STEPS = 7  # of each, and one before


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--hidden", type=int, default=512, help="the width of the model")
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--dtype", default="float32", help="that matrices are orthogonalised in")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder, "model"), given.hidden, given.layers)
        multiprocessing.spawn(_rank, (given.ranks, folder, given.dtype), nprocs=given.ranks)
        ranks = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(given.ranks)]
        planned = {kind: _planned(Path(folder, "model"), kind, given.ranks) for kind in KINDS}
    seconds = {
        kind: statistics.median(map(max, zip(*(r[kind][0] for r in ranks), strict=True))) for kind in KINDS
    }
    held = {kind: max(rank[kind][1] for rank in ranks) for kind in KINDS}
    print(f"{given.ranks} ranks, {given.layers} layers of width {given.hidden}, torch {torch.__version__}")
    for kind in KINDS:
        print(f"  {kind:6} {1e3 * seconds[kind]:8.1f} ms per step, {held[kind] / 2**20:7.1f} MiB of averages")
    ratios = [figures["muon"] / figures["adamw"] for figures in (seconds, held, planned)]
    print("  muon / adamw: {:.2f} of the time, {:.3f} of the memory, {:.3f} as planned".format(*ratios))
    return 0 if abs(ratios[1] / ratios[2] - 1) < 0.02 else 1


def _write(folder: Path, hidden: int, layers: int) -> None:
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, vocab_size=4096)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def _planned(model: Path, kind: str, ranks: int) -> int:
    """The bytes of a gradient's averages on each device, as the planner counts them."""
    overrides = [f"models.policy.path={model}", f"models.policy.optimizer.kind={kind}"]
    return MASTER * averages_on_device(
        size_of(str(model)), compile_graph("grpo", overrides, ranks).models["policy"], ranks
    )


def _rank(rank: int, ranks: int, folder: str, dtype: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    found: dict[str, Any] = {}
    for kind in KINDS:
        engine = FsdpEngine.of(str(Path(folder, "model")), optimizer={"lr": 1e-4, "kind": kind}, dtype=dtype)
        for parameter in engine.parameters:
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).normal_()
        times = [_timed(engine) for _ in range(STEPS + 1)][1:]
        states = (v for state in engine.optimizer.state.values() for v in state.values())
        found[kind] = times, sum(local(v).nbytes for v in states if v.dim())
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.barrier()
    os._exit(0)  # torch's threads now and then abort a process that is torn down


def _timed(engine: FsdpEngine) -> float:
    dist.barrier()
    start = time.perf_counter()
    engine.optimizer.step()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
