"""Peaks and bytes of large models on 8 to 1,024 ranks: planned, held by the train engine, and ideal.

    python benchmarks/large_models.py [--only TEXT]

An update and a log-prob pass of one micro-batch of ``FsdpEngine`` run at full size on fake tensors, as rank 0
of a fake process group (``fake_engine.py``), on each mesh: one copy, replicas of shards (HSDP), ranks that
share the tokens of a row (Ulysses), and ranks that divide a mixture's experts. For the peak of a rank, and
for what it receives in each kind of collective, a row says what is planned and what the engine has, and their
ratio; for bytes also how much more the engine receives than the algorithm must:

    all-gather       bfloat16 weights, twice in an update but for embeddings and head, once in a log-prob pass
                     (ZeRO-3, arXiv 1910.02054)
    reduce-scatter   float32 gradients, once per micro-batch
    all-reduce       float32 shards of gradients, once per update, by a ring between replicas
    all-to-all       queries, keys, values and outputs, once per pass of a layer (arXiv 2309.14509), what
                     rings gather of keys and values, and each token to its experts and back, where these
                     are divided (arXiv 2006.16668)

The target: planned / held from 0.98 to 1.15. Ends with 1 where a row is outside.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from fake_engine import Setting, collected, measured
from memory_fake import HIGH, LOW, name_of, predicted, predicted_bytes

from rlgraph.costs.model_size import size_of

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B")
WORLDS = (8, 64, 256, 1024)
NAMES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "allgather_": "all-gather of scores",  # which ranks that share tokens scored; too little to be planned
}
LITTLE = 1e-3  # of all bytes of a step


def settings() -> Iterator[Setting]:
    """What is compared."""
    for model in MODELS:
        mixture = size_of(model).config.experts
        for world in WORLDS:
            whole = Setting(model, world=world)
            shared = replace(whole, tokens=65536, row=65536, sequence=8)
            replicas = [replace(whole, shard=world // 8), replace(shared, shard=world // 8)]
            divided = [replace(whole, experts=8), replace(shared, experts=8)] * bool(mixture)
            for mesh in (whole, shared, *(replicas if world > 8 else ()), *divided):
                yield mesh
                yield replace(mesh, step="logprobs")


def ideal_bytes(setting: Setting) -> Counter[str]:
    """Return the bytes that a rank has to receive in each kind of collective, without any padding."""
    size, update = size_of(setting.model), setting.step == "update"
    shard, sequence = setting.shard or setting.world, setting.sequence
    replicas, config = setting.world // shard, size.config
    passes = 2 if update and replicas > 1 else 1  # micro-batches, as ``collected`` runs them
    group, inner = setting.experts, config.expert_size * config.hidden_size
    fused = passes * config.num_hidden_layers * config.experts * 3 * inner
    # of the experts a rank has its own, on fewer ranks
    weights = passes * size.parameters * (shard - 1) / shard - fused * (1 - 1 / group)
    heads = gcd(sequence, config.key_heads)  # the other ranks are in rings, which gather keys and values
    traded = (config.queries + config.keys) * setting.tokens / sequence * (heads - 1) / heads
    gathered = config.keys / heads * setting.tokens * (1 - heads / sequence)
    shared = 2 * (traded + gathered) * 2 * config.num_hidden_layers
    chosen = 2 * config.num_experts_per_tok * config.hidden_size * config.num_hidden_layers
    shared += chosen * setting.tokens / sequence * (group - 1) / group * 2
    ends = passes * sum(rows * numbers for rows, numbers in size.root_tensors) * (shard - 1) / shard
    ideal = {"_allgather_base_": 2 * ((2 * weights - ends) if update else weights)}
    ideal["alltoall_base_"] = passes * ((3 if setting.recompute else 2) if update else 1) * shared
    if update:
        ideal["_reduce_scatter_base_"] = 4 * weights
        ideal["allreduce_"] = 2 * (replicas - 1) / replicas * 4 * size.parameters / shard
    return Counter({name: round(size) for name, size in ideal.items()})


def ratios(setting: Setting) -> dict[str, tuple[int, int, int]]:
    """Return what is planned, held or received, and ideal (0: none), of the peak and of each collective."""
    planned, received, ideal = predicted_bytes(setting), collected(setting), ideal_bytes(setting)
    rows = {"peak": (predicted(setting)[0].total(), measured(setting).total(), 0)}
    for collective in NAMES:
        if max(planned[collective], received[collective]) > LITTLE * received.total():
            rows[NAMES[collective]] = planned[collective], received[collective], ideal[collective]
    return rows


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", default="", help="settings whose name contains it")
    only = arguments.parse_args().only
    print("| setting | what | planned, GB | engine, GB | planned / engine | engine / ideal |")
    print("|---|---|---|---|---|---|")
    every = []
    for setting in settings():
        if only not in name_of(setting):
            continue
        for what, (planned, engine, ideal) in ratios(setting).items():
            ratio = planned / engine if engine else float("inf")
            every.append(ratio)
            above = f"{engine / ideal:.3f}" if ideal else ""
            sums = f"{planned / 1e9:,.2f} | {engine / 1e9:,.2f} | {ratio:.3f}"
            print(f"| {name_of(setting)} | {what} | {sums} | {above} |", flush=True)
    outside = sum(not LOW <= ratio <= HIGH for ratio in every)
    print(
        f"\n{len(every)} rows, planned / engine from {min(every):.3f} to {max(every):.3f}, {outside} outside"
    )
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
