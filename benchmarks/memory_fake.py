"""Peaks that the planner predicts beside what the train engine holds on fake tensors, at full size.

    python benchmarks/memory_fake.py [--only TEXT] [--json FILE]

A row for each setting: a model's update, log-probs or weight sync on so many ranks, with micro-batches of so
many tokens. What is resident (weights, AdamW's averages) is part of both. The target: never more than 2 %
below, at most 15 % above. Ends with 1 where a setting is outside. See ``fake_engine.py`` for what is run, and
for what it can't see.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_engine import Setting, measured

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import BEST
from rlgraph.costs.formulas import (
    dispatch_bytes,
    exchange_bytes,
    gather_bytes,
    reduction_bytes,
    replica_bytes,
    score_bytes,
    update_bytes,
)
from rlgraph.costs.lora_size import trained_on_device
from rlgraph.costs.muon import step_bytes
from rlgraph.costs.plan_size import part_of
from rlgraph.costs.pricing import Pricing, sizes_of
from rlgraph.costs.workload import workload
from rlgraph.ir.actions import Sync
from rlgraph.ir.plan import Step
from rlgraph.lengths import Lengths

LOW, HIGH = 0.98, 1.15
K = 1024
DENSE = ("Qwen/Qwen3-8B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B")
MIXTURE, SMALLEST, LARGE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-32B"
OTHERS = (
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen2.5-14B",
    "Qwen/Qwen2.5-32B",
    "mistralai/Mixtral-8x7B-v0.1",
)


def settings() -> Iterator[Setting]:
    """What is compared."""
    for name in (*DENSE, MIXTURE):
        base = Setting(name)
        for world in (8, 64, 1024):
            yield replace(base, world=world)
            yield replace(base, world=world, tokens=4 * K, recompute=False)
            yield replace(base, world=world, step="logprobs")
            yield replace(base, world=world, step="logprobs", tokens=4 * K)
        yield replace(base, tokens=4 * K)
        yield replace(base, world=64, recompute=False)
        yield replace(base, step="ref", tokens=4 * K)
        yield replace(base, step="sync")
        yield replace(base, world=1024, step="sync")
        yield replace(base, lora=32)
        yield replace(base, lora=32, tokens=4 * K, recompute=False)
        yield replace(base, lora=32, step="sync")
    for name in (DENSE[0], MIXTURE):
        base = Setting(name)
        for packed in ("mask", "varlen"):
            yield replace(base, packed=packed)
            yield replace(base, packed=packed, recompute=False)
            yield replace(base, packed=packed, step="logprobs")
            yield replace(base, packed=packed, lora=32, recompute=False)
        yield replace(base, world=1024, lora=32)
        yield replace(base, tokens=K, row=K)
        yield replace(base, tokens=8 * K, row=8 * K)
        yield replace(base, world=64, tokens=64 * K)
        yield replace(base, world=64, tokens=64 * K, step="logprobs")
    yield Setting(DENSE[0], step="logprobs", tokens=K, row=K)
    yield Setting(DENSE[0], tokens=4 * K, dtype="float32")
    yield Setting(DENSE[0], step="logprobs", dtype="float32")
    for name in DENSE[:2]:
        yield Setting(name, world=64, tokens=128 * K)
    for tokens in (16 * K, 64 * K, 640 * K):
        yield Setting(SMALLEST, tokens=tokens)
        yield Setting(SMALLEST, tokens=tokens, step="logprobs")
    yield Setting(SMALLEST, recompute=False)
    for world in (1, 8):
        yield Setting(SMALLEST, world=world, tokens=4 * K)
    yield Setting(SMALLEST, world=1, tokens=4 * K, dtype="float32")
    for world in (64, 1024):
        yield Setting(LARGE, world=world)
        yield Setting(LARGE, world=world, step="logprobs", tokens=4 * K)
        yield Setting(LARGE, world=world, lora=32)
    yield Setting(LARGE, world=64, recompute=False, tokens=4 * K)
    yield Setting(LARGE, world=64, step="sync")
    yield Setting(LARGE, step="sync", lora=32)
    for name in (DENSE[0], MIXTURE):
        base = Setting(name, world=64, shard=8)
        yield base
        yield replace(base, world=16, tokens=4 * K, recompute=False)
        yield replace(base, step="logprobs")
        yield replace(base, step="ref", tokens=4 * K)
        yield replace(base, step="sync")
        yield replace(base, lora=32)
        yield replace(base, world=1024, shard=64)
    yield Setting(SMALLEST, world=16, shard=8)
    for tensor in (2, 8):
        base = Setting(DENSE[0], tensor=tensor)
        yield base
        yield replace(base, tokens=4 * K, recompute=False)
        yield replace(base, step="logprobs")
        yield replace(base, step="ref", tokens=4 * K)
        yield replace(base, step="sync")
        yield replace(base, optimizer_offload=True, activation_offload=True)
        yield Setting(LARGE, world=64, tensor=tensor)
    for experts in (2, 8):
        base = Setting(MIXTURE, experts=experts)
        yield base
        yield replace(base, tokens=4 * K, recompute=False)
        yield replace(base, world=64)
        yield replace(base, world=64, shard=8)
        yield replace(base, step="logprobs")
        yield replace(base, step="ref", tokens=4 * K)
        yield replace(base, step="sync")
        yield replace(base, optimizer_offload=True, activation_offload=True)
        yield replace(base, tokens=64 * K, row=64 * K, sequence=8)
    for dtype in ("float32", "bfloat16"):
        yield Setting(SMALLEST, world=8, shard=1, tokens=4 * K, dtype=dtype)
    yield Setting(SMALLEST, world=8, shard=1, step="ref", tokens=4 * K)
    for name in (DENSE[0], LARGE, MIXTURE):
        yield Setting(name, world=64, optimizer_offload=True)
        yield Setting(name, optimizer_offload=True, tokens=4 * K, recompute=False)
        yield Setting(name, optimizer_offload=True, step="logprobs")
        yield Setting(name, world=64, activation_offload=True)
        yield Setting(name, optimizer_offload=True, activation_offload=True, tokens=64 * K, row=64 * K)
    for name in (DENSE[0], MIXTURE):
        for world in (8, 64):
            yield Setting(name, world=world, optimizer="muon")
            yield Setting(name, world=world, wide=True)
        yield Setting(name, step="logprobs", wide=True)
    for name in OTHERS:
        yield Setting(name, world=64)
        yield Setting(name, world=64, step="logprobs")


def name_of(setting: Setting) -> str:
    """A setting in one word, such as ``qwen3-8b-update-w8-m16k-r4k-recompute``."""
    words = [Path(setting.model).name.lower(), setting.step, f"w{setting.world}"]
    words += [f"s{setting.shard}"] * bool(setting.shard)
    if setting.step != "sync":
        words += [f"m{setting.tokens // K}k", f"r{setting.row // K}k"]
    if setting.step == "update":
        words.append("recompute" if setting.recompute else "keep")
    words += [f"sp{setting.sequence}"] * (setting.sequence > 1)
    words += [f"tp{setting.tensor}"] * (setting.tensor > 1) + [f"ep{setting.experts}"] * (setting.experts > 1)
    words += ["hostopt"] * setting.optimizer_offload + ["hostact"] * setting.activation_offload
    words += [setting.packed] * bool(setting.packed) + [f"lora{setting.lora}"] * bool(setting.lora)
    words += [word.removeprefix("experts.") for word in setting.targets if setting.targets != "all-linear"]
    words += [setting.optimizer] * (setting.optimizer != "adamw") + ["fp32head"] * setting.wide
    return "-".join(words + ["fp32"] * (setting.dtype == "float32"))


def priced(setting: Setting) -> tuple[Pricing, Step]:
    """The plan of a setting, with sizes and prices, and the step that is meant."""
    train = {
        "shard": setting.shard,
        "micro_tokens": setting.tokens,
        "recompute": setting.recompute,
        "dtype": setting.dtype,
        "packing": bool(setting.packed),
        "sequence_parallel": setting.sequence,
        "tensor_parallel": setting.tensor,
        "expert_parallel": setting.experts,
        "optimizer_offload": setting.optimizer_offload,
        "activation_offload": setting.activation_offload,
        "head_dtype": "float32" if setting.wide else None,
    }
    model = "ref" if setting.step == "ref" else "policy"
    overrides = [f"models.{model}.train.{key}={json.dumps(value)}" for key, value in train.items()]
    overrides += [f"models.{name}.path={setting.model}" for name in ("policy", "ref")]
    overrides.append("models.policy.serve.dtype=bfloat16")
    overrides.append(f"models.policy.optimizer.kind={setting.optimizer}")
    if setting.lora:
        targets = setting.targets if isinstance(setting.targets, str) else f"[{', '.join(setting.targets)}]"
        overrides.append(f"models.policy.train.lora={{rank: {setting.lora}, targets: {targets}}}")
    plan = compile_graph("grpo", overrides, setting.world)
    lengths = Lengths(mean=setting.row, longest=setting.row)
    work = replace(workload(plan), longest_prompt=0.0, responses=lengths, rows={})
    kind = "cpu" if setting.packed == "mask" else "cuda"
    cluster = load_cluster("h100-8").model_copy(update={"kind": kind})
    pricing = Pricing(plan, cluster, work, sizes_of(plan))
    (step,) = [step for step in plan.steps if _is_meant(step, setting.step, model)]
    return pricing, step


def predicted(setting: Setting) -> tuple[Counter[str], str]:
    """The parts that the planner counts for the train engine of a step, and the worst moment's name."""
    footprint, step = priced(setting)
    model = "ref" if setting.step == "ref" else "policy"
    held = Counter(
        {
            {"parameters": "weights"}.get(item.name, item.name): size
            for item, size in footprint.items("main").items()
            if (item.model, item.engine) == (model, "train")
        }
    )
    moments = footprint.passing(step) if not step.inserted else {"sync": footprint.transient("main", step)}
    name, parts = max(moments.items(), key=lambda moment: moment[1].total())
    assert parts == footprint.transient("main", step)
    return held + parts, name


def predicted_bytes(setting: Setting) -> Counter[str]:
    """The bytes that the planner counts for each kind of collective of what ``collected`` runs."""
    pricing, step = priced(setting)
    if setting.step == "sync":
        return Counter({"allgather_": round(pricing.priced(step).bytes or 0)})
    (name,), (model, size) = step.models, pricing.model_of(step)
    mesh = pricing.plan.meshes[name]
    size, rates = part_of(size, mesh.tensor), pricing._rates(step.pool, setting.dtype, BEST, mesh)
    group, update = replace(rates, devices=setting.sequence), setting.step == "update"
    passes = 2 if update and mesh.replicate > 1 else 1
    factor = (4 if setting.recompute else 3) if update else 1
    exchanged = passes * max(1, factor - 1) * setting.tokens
    counts = {"alltoall_base_": exchange_bytes(size, group, exchanged)}
    if setting.optimizer == "muon":
        counts["alltoall_base_"] += 2 * step_bytes(size, rates)  # one as the averages are made, one behind
    group = replace(rates, devices=mesh.experts)
    counts["alltoall_base_"] += dispatch_bytes(size, group, exchanged / setting.sequence)
    group = replace(rates, devices=mesh.tensor)
    counts["allreduce_"] = passes * reduction_bytes(size, group, setting.tokens, factor)
    if update:
        trained = trained_on_device(size, model, mesh.shard)
        gradients = passes * (
            gather_bytes(size, mesh.shard) if not setting.lora else (mesh.shard - 1) * trained * 4
        )
        adapters = trained if setting.lora else None
        counts["_allgather_base_"] = update_bytes(size, rates, passes, 1, adapters) - gradients
        counts["_reduce_scatter_base_"] = gradients
        counts["allreduce_"] += replica_bytes(trained, rates, 1)
    else:
        counts["_allgather_base_"] = score_bytes(size, rates, 1)
    return Counter({collective: round(size) for collective, size in counts.items() if size})


def _is_meant(step: Step, what: str, model: str) -> bool:
    if what == "sync":
        return isinstance(step.action, Sync)
    run = step.run
    return bool(run) and run.engine == "train" and model in run.models and run.updates == (what == "update")


def compared(setting: Setting, whole: bool = False) -> dict[str, Any]:
    """One row of the table."""
    start = time.perf_counter()
    plan, moment = predicted(setting)
    held = measured(setting, whole)
    return {
        "setting": name_of(setting),
        "predicted": plan.total(),
        "held": held.total(),
        "ratio": plan.total() / held.total(),
        "moment": moment,
        "parts": {
            part: (plan[part], held[part]) for part in sorted({*plan, *held}) if plan[part] + held[part] > 5e6
        },
        "seconds": time.perf_counter() - start,
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", default="", help="settings whose name contains it")
    arguments.add_argument("--json", help="a file for the rows, one object per line")
    arguments.add_argument("--whole", action="store_true", help="run all layers, rather than a few")
    given = arguments.parse_args()
    chosen = {name_of(s): s for s in settings() if given.only in name_of(s)}
    print(f"{'setting':52} {'predicted':>9} {'held':>9}  ratio  moment; parts, predicted/held, in GB of 10^9")
    outside = []
    for name, setting in chosen.items():
        row = compared(setting, given.whole)
        if given.json:
            with open(given.json, "a") as file:
                file.write(json.dumps(row) + "\n")
        parts = ", ".join(f"{part} {p / 1e9:.2f}/{h / 1e9:.2f}" for part, (p, h) in row["parts"].items())
        sums = f"{row['predicted'] / 1e9:9.2f} {row['held'] / 1e9:9.2f}  {row['ratio']:.3f}"
        print(f"{name:52} {sums}  {row['moment']}; {parts}", flush=True)
        if not LOW <= row["ratio"] <= HIGH:
            outside.append(name)
    print(f"{len(chosen)} settings, {len(outside)} outside {LOW} to {HIGH}: {', '.join(outside) or 'none'}")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
