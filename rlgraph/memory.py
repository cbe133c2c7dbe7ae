"""Peak memory of a device in bytes, each of them attributed to a part, as engines come and go.

What an engine can put off the device is an ``Item``: the parameters and the optimizer of a train engine, the
weights of a serve engine. The counts follow the engines of ``runtime/``: float32 masters, gradients and AdamW
averages in shards; decoder layers gathered one at a time; logits of a chunk of tokens; a serve engine with
all weights on each device. Columns are small: left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlgraph.adapters import trained_parameters
from rlgraph.cluster import Cluster
from rlgraph.cost import BUCKET, MASTER, SMALL, WIDTH
from rlgraph.plan import LEAVES, RETURNS, ModelPlan, Peak, Plan, Step
from rlgraph.sizes import Size
from rlgraph.workload import Workload

CHUNK = 2**26  # numbers of the logits that there are at once (runtime/fsdp/scoring.py)
MASK = 2**26  # numbers of the mask of a micro-batch of packed rows, at most (runtime/fsdp/packing.py)
CACHED = {"transformers": 2**19, "sglang": 2**16}  # tokens that an engine holds (runtime/serve)
SAMPLING = (
    20  # bytes of a logit in sampling: float32 copy, log-prob, probability; float64 sum (serve/sampling.py)
)
PREFILL = 8192  # prompt tokens that it reads at once
PARTS = (
    "weights", "gradients", "optimizer", "gathered weights", "activations", "logits",
    "serve weights", "kv cache", "staging", "reserve",
)  # fmt: skip


class Item(NamedTuple):
    """What an engine can put off its device: ``("policy", "train", "optimizer")``."""

    model: str
    engine: str
    part: str


@dataclass(frozen=True)
class Footprint:
    """What a plan's steps and engines take on a cluster."""

    plan: Plan
    cluster: Cluster
    work: Workload
    sizes: Mapping[str, Size]

    def on(self, pool: str, steps: Iterable[Step]) -> list[Step]:
        """The steps that a pool takes part in."""
        return [step for step in steps if pool in (step.pool, step.source)]

    def in_order(self) -> list[Step]:
        """The training steps in the order in which they run while the pipeline is full."""
        by_id = {step.id: step for step in self.plan.steps}
        return [by_id[number] for number in self.plan.slot]

    def items(self, pool: str) -> dict[Item, int]:
        """What the engines of a pool hold, in bytes of a device."""
        found: dict[Item, int] = {}
        for name, model in self.plan.models.items():
            size = self.sizes.get(name)
            own = model.train and model.train["pool"] == pool and not model.shares and self._trains(name)
            if size and model.train and own:
                shard = -(-size.parameters // self.plan.pools[pool])
                trained = -(-trained_parameters(size, model) // self.plan.pools[pool])
                added = trained * MASTER if model.train["lora"] else 0
                found[Item(name, "train", "parameters")] = shard * master(model) + added
                if not model.frozen:
                    found[Item(name, "train", "optimizer")] = 2 * trained * MASTER
            if size and model.serve and model.serve["pool"] == pool and not model.serve["addresses"]:
                width, group = WIDTH[model.serve["dtype"]], model.serve["tensor_parallel"]
                found[Item(name, "serve", "weights")] = -(-size.parameters * width // group)
                if model.serve["engine"] == "sglang":  # which has its cache as long as it is awake
                    found[Item(name, "serve", "kv")] = self._cache(name, size)
        return found

    def _cache(self, model: str, size: Size) -> int:
        """Keys and values of the most samples that a rollout has in flight, in bytes of a device."""
        serve = self.plan.models[model].serve
        assert serve
        steps = (*self.plan.steps, *self.plan.eval_steps)
        rollouts = [
            step for step in steps if step.kind == "run" and step.engine == "serve" and model in step.models
        ]
        rows = max((slots(self.plan, step, self.work) for step in rollouts), default=0)
        cached = rows * int(self.work.most) * size.kv_bytes(WIDTH[serve["dtype"]])
        return -(-cached // int(serve["tensor_parallel"]))

    def _trains(self, model: str) -> bool:
        steps = (*self.plan.steps, *self.plan.eval_steps)
        readers = {model, *(name for name, other in self.plan.models.items() if other.shares == model)}
        reads = (step for step in steps if step.engine == "train" or step.kind == "sync")
        return any(readers & step.models.keys() for step in reads)

    def needs(self, pool: str, step: Step) -> set[Item]:
        """What has to be on a pool's devices while a step runs: of a region, what any of its steps needs.

        Its steps are repeated, and engines do not come and go between two rounds.
        """
        steps = (*self.plan.steps, *self.plan.eval_steps)
        together = [other for other in steps if step.region and other.region == step.region] or [step]
        return set().union(*(self._needs(pool, one) for one in together))

    def _needs(self, pool: str, step: Step) -> set[Item]:
        found: set[Item] = set()
        for name in step.models if step.kind in ("run", "sync") else ():
            if step.pool == pool and step.engine == "serve":
                found.add(Item(name, "serve", "weights"))
                if step.kind == "run":
                    found.add(Item(name, "serve", "kv"))
            if (step.kind == "sync" and pool == (step.source or step.pool)) or step.engine == "train":
                found.add(Item(self.plan.models[name].shares or name, "train", "parameters"))
            if step.updated == name:
                found.add(Item(name, "train", "optimizer"))
        return found & self.items(pool).keys()

    def transient(self, pool: str, step: Step) -> Counter[str]:
        """What a step needs on a pool beside what is resident."""
        name = next(iter(step.models), None)
        if name is None or step.kind not in ("run", "sync"):
            return Counter()
        size, model = self.sizes[name], self.plan.models[name]
        if step.kind == "sync":
            return staging(size, self.plan.pools[pool], pool == (step.source or step.pool))
        if step.engine == "serve":
            assert model.serve
            if model.serve["addresses"]:
                return Counter()  # it is the servers' memory
            return generating(size, model.serve, slots(self.plan, step, self.work), self.work.most)
        if step.copied:
            return staging(size, self.plan.pools[pool], sends=True)
        assert model.train
        most = self.work.most
        rows = _rows(self.plan, step, self.work)
        budget = int(min(max(model.train["micro_tokens"], most), rows * most))
        taken = passing(size, model, budget, step.updates, len(step.devices))
        taken["activations"] += mask_bytes(model, budget, int(most))
        return taken

    def resident(self, pool: str, away: set[Item]) -> Counter[str]:
        """The parts of a device that engines hold, but for what is away."""
        held: Counter[str] = Counter({"reserve": int(self.cluster.reserve)})
        for item, size in self.items(pool).items():
            if item not in away:
                held[LABELS[item.part, item.engine]] += size
        return held

    def moments(self, pool: str, steps: Iterable[Step]) -> Iterator[tuple[Step, Counter[str]]]:
        """What a device of a pool holds in each step, from the state between two iterations on."""
        away = set(away_items(self.plan))
        for step in self.on(pool, steps):
            moved = {Item(name, step.engine, part) for name in step.models for part in step.parts}
            if step.kind in RETURNS:
                away -= moved
            yield step, self.resident(pool, away) + self.transient(pool, step)
            if step.kind in LEAVES:
                away |= moved

    def peaks(self) -> dict[str, Peak]:
        """The peak of each pool, over training and evaluation."""
        found = {}
        for pool in self.plan.pools:
            both = (self.in_order(), self.plan.eval_steps)
            moments = [(s.node, parts) for steps in both for s, parts in self.moments(pool, steps)]
            held = self.resident(pool, set(away_items(self.plan)))
            name, parts = max(moments, key=lambda m: m[1].total(), default=("", held))
            ordered = {part: parts[part] for part in PARTS if parts[part]}
            found[pool] = Peak(sum(ordered.values()), int(self.cluster.memory), name, ordered)
        return found


LABELS = {
    ("parameters", "train"): "weights",
    ("optimizer", "train"): "optimizer",
    ("weights", "serve"): "serve weights",
    ("kv", "serve"): "kv cache",
}


def away_items(plan: Plan) -> Iterator[Item]:
    """What is off its device between two iterations."""
    for engine, parts in plan.away.items():
        model, _, kind = engine.rpartition(".")
        yield from (Item(model, kind, part) for part in parts)


def master(model: ModelPlan) -> int:
    """Bytes of a weight in the train engine; beside an adapter it is held as it is computed with."""
    assert model.train
    fixed = model.frozen or model.train["lora"]
    return WIDTH[model.train["dtype"]] if fixed else MASTER


def slots(plan: Plan, step: Step, work: Workload) -> int:
    """Samples that an engine generates at a time."""
    serve = plan.models[next(iter(step.models))].serve
    assert serve
    rows = device_rows(plan, step, work) * serve["tensor_parallel"]
    cached = serve["cache_tokens"] or CACHED[serve["engine"]]
    return int(max(1, min(rows, serve["max_rows"], cached // work.most)))


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


def staging(size: Size, devices: int, sends: bool) -> Counter[str]:
    """A bucket of a weight sync. Who sends: own shard twice, the gathered whole, and its tensors cut out."""
    bucket = min(size.parameters, max(BUCKET, size.embedding))
    if not sends:
        return Counter({"staging": bucket * MASTER})
    return Counter({"staging": 2 * bucket * MASTER + 2 * MASTER * -(-bucket // devices)})


def generating(size: Size, serve: Mapping[str, Any], rows: int, length: float) -> Counter[str]:
    """One engine's slots at their full length; sampling's float32 copies of the logits; one layer's work.

    The embedded engine has its cache only while it generates, and repeats keys and values of one layer for
    every query head while that runs.
    """
    width, group = WIDTH[serve["dtype"]], serve["tensor_parallel"]
    prefill = PREFILL * layer_activations(size, width)
    logits = rows * size.vocabulary * (width + SAMPLING)
    if serve["engine"] == "sglang":
        return Counter({"logits": logits // group, "activations": prefill // group})
    repeated = 2 * rows * int(length) * size.config.queries * width
    cache = rows * int(length) * size.kv_bytes(width)
    return Counter({"kv cache": cache, "logits": logits, "activations": max(repeated, prefill)})


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
    """The logits of one chunk of tokens and copies of them, and hidden states of the scored tokens.

    Without gradients that is one in float32, beside a narrower one for a moment. An update holds the logits
    scaled by the temperature and their softmax, and the gradient of the hidden states; an entropy that is
    differentiated takes another, which is left out.
    """
    chunk = min(tokens, max(1, CHUNK // size.vocabulary)) * size.vocabulary
    copies = 2 * MASTER + width if update else MASTER + (width if width < MASTER else 0)
    return copies * chunk + (2 if update else 1) * tokens * size.config.hidden_size * width


def passing(size: Size, model: ModelPlan, tokens: int, update: bool, devices: int) -> Counter[str]:
    """One micro-batch of ``tokens`` through a train engine, all of them scored.

    With ``recompute``, a layer keeps its input alone, and what is between is there for one layer at a time.
    """
    assert model.train
    width, layers = WIDTH[model.train["dtype"]], size.config.num_hidden_layers if update else 1
    kept = tokens * layer_activations(size, width)
    if update and model.train["recompute"]:
        kept += tokens * size.config.hidden_size * width * layers
    else:
        kept *= layers
    return Counter(
        {
            "gathered weights": gathered(size, width, update, model),
            "gradients": MASTER * -(-trained_parameters(size, model) // devices) if update else 0,
            "activations": kept,
            "logits": logits_bytes(size, width, tokens, update),
        }
    )


def mask_bytes(model: ModelPlan, tokens: int, longest: int) -> int:
    """The most that the mask of packed rows takes (runtime/fsdp/packing.py); 0 where they are not packed."""
    assert model.train
    if not model.train["packing"] or longest * max(longest, tokens) > MASK:
        return 0
    width = max(longest, min(8 * longest, tokens, MASK // max(1, tokens)))
    return max(tokens, width) * width * WIDTH[model.train["dtype"]]


def gathered(size: Size, width: int, update: bool, model: ModelPlan) -> int:
    """Weights whole, and gradients on their way into shards, of what is gathered at a time.

    That is two decoder layers (one runs, the next is on its way) with embedding and head; or a small model.
    Adapters are counted as if all of them were gathered at once.
    """
    small = size.parameters <= SMALL
    weights = size.parameters if small else size.root + 2 * max(size.layers)
    gradients = size.parameters if small else size.root + max(size.layers)
    if model.train and model.train["lora"]:
        gradients = trained_parameters(size, model)
        weights += gradients
    return weights * width + (gradients * (width + MASTER) if update else 0)
