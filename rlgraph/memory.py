"""Peak memory of a device in bytes, each of them attributed to a part. Every engine stays where it is.

The counts follow the engines of ``runtime/``: float32 masters, gradients and AdamW averages in shards;
decoder layers gathered one at a time; no activation checkpointing; logits whole in the engine's data type
with float32 copies in chunks; a serve engine with all weights on each device. Columns are small: left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlgraph.cluster import Cluster
from rlgraph.cost import BUCKET, MASTER, SMALL, WIDTH
from rlgraph.plan import ModelPlan, Peak, Plan, Step
from rlgraph.sizes import Size
from rlgraph.workload import Workload

CHUNK = 2**26  # numbers of the logits that are in float32 at once (runtime/fsdp/scoring.py)
CACHED = 2**19  # tokens that a serve engine's slots hold together (runtime/serve/transformers.py)
SAMPLING = (
    20  # bytes of a logit in sampling: float32 copy, log-prob, probability; float64 sum (serve/sampling.py)
)
PREFILL = 8192  # prompt tokens that it reads at once
PARTS = (
    "weights", "gradients", "optimizer", "gathered weights", "activations", "logits",
    "serve weights", "kv cache", "staging", "reserve",
)  # fmt: skip


def peaks(plan: Plan, cluster: Cluster, work: Workload, sizes: Mapping[str, Size]) -> dict[str, Peak]:
    """The peak of each pool, over training and evaluation."""
    found = {}
    steps = (*plan.steps, *plan.eval_steps)
    for pool, devices in plan.pools.items():
        inside = [step for step in steps if step.pool == pool]
        held = resident(plan, inside, devices, sizes) + Counter({"reserve": int(cluster.reserve)})
        moments = [(step.node, held + transient(plan, step, work, sizes)) for step in inside]
        name, parts = max(moments, key=lambda m: m[1].total(), default=("", held))
        ordered = {part: parts[part] for part in PARTS if parts[part]}
        found[pool] = Peak(sum(ordered.values()), int(cluster.memory), name, ordered)
    return found


def resident(plan: Plan, steps: list[Step], devices: int, sizes: Mapping[str, Size]) -> Counter[str]:
    """What the engines of a pool hold throughout."""
    held: Counter[str] = Counter()
    for name, model in plan.models.items():
        users = [step for step in steps if name in step.models]
        size = sizes.get(name)
        if (
            size
            and model.train
            and any(step.kind == "sync" or handle(plan, step) == "train" for step in users)
        ):
            held += trained(size, model, devices)
        if size and model.serve and any(handle(plan, step) == "serve" for step in users):
            held["serve weights"] += size.parameters * WIDTH[model.serve["dtype"]]
    return held


def trained(size: Size, model: ModelPlan, devices: int) -> Counter[str]:
    """A train engine's shards: 16 bytes a parameter, or the weights alone of a frozen model."""
    assert model.train
    shard = -(-size.parameters // devices)
    if model.frozen:
        return Counter({"weights": shard * WIDTH[model.train["dtype"]]})
    return Counter({"weights": shard * MASTER, "gradients": shard * MASTER, "optimizer": 2 * shard * MASTER})


def handle(plan: Plan, step: Step) -> str | None:
    """The engine that a step runs on: train, serve or none."""
    function = plan.functions[step.phase].get(step.node)
    handles = function.handles.values() if function else ()
    return next((kind for kind in handles if kind in ("train", "serve")), None)


def transient(plan: Plan, step: Step, work: Workload, sizes: Mapping[str, Size]) -> Counter[str]:
    """What a step needs beside what is resident."""
    name = next(iter(step.models), None)
    if name is None:
        return Counter()
    size, model, devices = sizes[name], plan.models[name], len(step.devices)
    if step.kind == "sync":
        return staging(size, devices)
    if handle(plan, step) == "serve":
        assert model.serve
        return generating(size, WIDTH[model.serve["dtype"]], slots(plan, step, work), work.most)
    if handle(plan, step) == "train":
        assert model.train
        budget = int(min(max(model.train["micro_tokens"], work.most), _rows(plan, step, work) * work.most))
        return passing(size, WIDTH[model.train["dtype"]], budget, step.updates)
    return Counter()


def slots(plan: Plan, step: Step, work: Workload) -> int:
    """Samples that a device generates at a time."""
    serve = plan.models[next(iter(step.models))].serve
    assert serve
    rows = device_rows(plan, step, work)
    return int(max(1, min(rows, serve["max_rows"], CACHED // work.most)))


def device_rows(plan: Plan, step: Step, work: Workload) -> float:
    """Samples that the busiest device generates: whole prompts. Of an evaluation, no bound is known."""
    column = plan.columns[step.phase][step.writes[0]]
    if step.phase != "train":
        return float("inf")
    prompts = work.rows[column.domain] / column.times
    return -(-prompts // len(step.devices)) * column.times


def _rows(plan: Plan, step: Step, work: Workload) -> float:
    domains = [plan.columns[step.phase][column].domain for column in step.reads]
    return max((work.rows.get(d, float("inf")) for d in domains), default=float("inf"))


def staging(size: Size, devices: int) -> Counter[str]:
    """A bucket of a weight sync: own shard twice, the gathered whole, and its tensors cut out."""
    bucket = min(size.parameters, max(BUCKET, size.embedding))
    return Counter({"staging": 2 * bucket * MASTER + 2 * MASTER * -(-bucket // devices)})


def generating(size: Size, width: int, rows: int, length: float) -> Counter[str]:
    """Slots at their full length; sampling's float32 copies of the logits; one layer's work.

    Keys and values of one layer are repeated for every query head while it runs.
    """
    repeated = 2 * rows * int(length) * size.config.queries * width
    return Counter(
        {
            "kv cache": rows * int(length) * size.kv_bytes(width),
            "logits": rows * size.vocabulary * (width + SAMPLING),
            "activations": max(repeated, PREFILL * layer_activations(size, width)),
        }
    )


def layer_activations(size: Size, width: int) -> int:
    """Bytes that one decoder layer keeps of a token for the backward pass, as transformers writes it.

    In numbers of ``width``: two norms, each its scaled input and its output; queries and keys as they enter
    attention, values, and what comes out; gate, its activation, up and their product. In float32: each norm's
    input. A norm of queries and keys keeps as much of them. tests/runtime/test_sizes.py holds it against what
    autograd keeps. Of a mixture (not measured) every expert that a token chose, with its input and output.
    """
    config = size.config
    hidden, attention = config.hidden_size, 2 * config.queries + 2 * config.keys
    normed = config.queries + config.keys if config.model_type.startswith("qwen3") else 0
    if config.is_sparse(config.num_hidden_layers - 1):
        mlp = config.num_experts_per_tok * (4 * config.expert_size + 2 * hidden)
    else:
        mlp = 4 * config.intermediate_size
    return width * (4 * hidden + attention + normed + mlp) + MASTER * (2 * hidden + normed)


def logits_bytes(size: Size, width: int, tokens: int, update: bool) -> int:
    """Logits in the engine's data type, and float32 copies of one chunk of them.

    Where there are several chunks, the backward pass holds the logits' gradient beside them.
    """
    logits = tokens * size.vocabulary
    chunk = min(logits, CHUNK)
    copies = 2 if update and chunk < logits else 1
    return copies * logits * width + (3 if width == MASTER else 4) * chunk * MASTER


def passing(size: Size, width: int, tokens: int, update: bool) -> Counter[str]:
    """One micro-batch of ``tokens`` through a train engine, all of them scored."""
    layers = size.config.num_hidden_layers if update else 1
    return Counter(
        {
            "gathered weights": gathered(size, width, update),
            "activations": tokens * layer_activations(size, width) * layers,
            "logits": logits_bytes(size, width, tokens, update),
        }
    )


def gathered(size: Size, width: int, update: bool) -> int:
    """Weights whole, and gradients on their way into shards, of what is gathered at a time.

    That is two decoder layers (one runs, the next is on its way) with embedding and head; or a small model.
    """
    small = size.parameters <= SMALL
    weights = size.parameters if small else size.root + 2 * max(size.layers)
    gradients = size.parameters if small else size.root + max(size.layers)
    return weights * width + (gradients * (width + MASTER) if update else 0)
