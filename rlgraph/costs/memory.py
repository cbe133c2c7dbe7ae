"""Peak memory of a device in bytes, each of them attributed to a part, as engines come and go.

What an engine can put off the device is an ``Item``: the parameters and the optimizer of a train engine, the
weights of a serve engine. The counts follow the engines of ``runtime/``: float32 masters and AdamW averages
in shards; what a micro-batch takes at its worst moment (``moments``); a serve engine with all weights on each
device. Columns are small: left out.

One file: what engines hold, what a step needs of it, and what it takes beside are one account.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from rlgraph.costs import limits, lora_size
from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.hardware import Cluster
from rlgraph.costs.layer_memory import Layer, mask_bytes, staging
from rlgraph.costs.lora_size import served_parts, trained_on_device
from rlgraph.costs.model_size import Size
from rlgraph.costs.muon import averages_on_device
from rlgraph.costs.plan_size import cache_on_device, part_of
from rlgraph.costs.train_memory import Moments, Pass
from rlgraph.costs.workload import Workload, bytes_beside, growth
from rlgraph.engines.registry import serving
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan, Step
from rlgraph.ir.prediction import Peak

SAMPLING = 16  # bytes of a logit in sampling: log-prob and probability, float64 sum (serve/sampling.py)
SORTED = 36  # the same where top_p sorts: sorted probabilities and their tokens, float64 sums
# bytes of an SGLang server on CUDA beside weights and cache, asleep too: a context, and what it sets aside
# for constants and slack (512 MB) and CUDA graphs of 512 rows (2 MB each; srt/arg_groups/memory_hook.py)
SERVER = 2_000_000_000
PARTS = (
    "weights", "gradients", "optimizer", "gathered weights", "activations", "logits",
    "serve weights", "adapters", "kv cache", "server", "staging", "reserve",
)  # fmt: skip


class Item(NamedTuple):
    """A part that an engine can put off its device: ``("policy", "train", "optimizer")``."""

    model: str
    engine: str
    part: str


@dataclass(frozen=True)
class Footprint:
    """The memory that a plan's steps and engines take on a cluster."""

    plan: Plan
    cluster: Cluster
    work: Workload
    sizes: Mapping[str, Size]

    def on(self, pool: str, steps: Iterable[Step]) -> list[Step]:
        """Return the steps that a pool takes part in."""
        return [step for step in steps if pool in (step.pool, step.source)]

    def model_of(self, step: Step) -> tuple[ModelPlan, Size]:
        """Return the model that a step works on, and its size."""
        name = next(iter(step.models))
        return self.plan.models[name], self.sizes[name]

    def serve(self, model: str) -> ServePlan:
        """Return the engine that generates with a model."""
        serve = self.plan.models[model].serve
        assert serve
        return serve

    def rows(self, columns: Iterable[str], step: Step) -> float:
        """Return the rows of the longest of some columns; of an evaluation, no bound is known."""
        domains = (self.plan.columns[step.phase][column].domain for column in columns)
        return max((self.work.rows.get(domain, math.inf) for domain in domains), default=0.0)

    def server_rows(self, step: Step, ahead: bool = True) -> float:
        """Return a server's samples, whole prompts: all that are begun, or an iteration's; else infinity."""
        if step.phase != "train":
            return math.inf  # nobody says how many an evaluation has
        samples = self.plan.domain(step.phase, step.writes[0])
        share = self.serve(next(iter(step.models))).tensor_parallel / len(step.devices)
        if region := self.plan.regions.get(step.region if ahead else ""):
            share *= region.begun / region.rows
        return math.ceil(self.work.rows[samples.name] / samples.times * share) * samples.times

    def share(self, step: Step, pool: str) -> float:
        """Return the samples of a device of a pool that is lent to a step, over those of one of its own."""
        if pool == step.pool:
            return 1.0
        own, more = len(step.devices), self.plan.pools[pool]
        return own / (own + more)

    def slots(self, step: Step, times: float = 1.0) -> int:
        """Return the samples that an engine generates at a time, of so many times the expected rows."""
        serve = self.serve(next(iter(step.models)))
        sample = self.work.mean if serving(serve).paged else self.work.most  # paged: as much as it has
        have, fit = self.server_rows(step) * times, int(serve.cache_tokens) // sample
        return int(max(1, min(have, serve.max_rows, fit)))

    def in_order(self) -> list[Step]:
        """Return the training steps in the order in which they run while the pipeline is full."""
        return [self.plan.steps[number - 1] for number in self.plan.slot]

    def items(self, pool: str) -> Mapping[Item, int]:
        """Return what the engines of a pool hold, in bytes of a device."""
        return self._items[pool]

    @cached_property
    def _items(self) -> dict[str, dict[Item, int]]:
        return {pool: self._held(pool) for pool in self.plan.pools}

    def _held(self, pool: str) -> dict[Item, int]:
        sizes: dict[Item, int] = {}
        for name, model in self.plan.models.items():
            size, serve = self.sizes.get(name), model.serve
            own = model.train and model.train.pool == pool and self._trains(name)
            if size and model.train and own:
                mesh = self.plan.meshes[name]
                part, devices = part_of(size, mesh.tensor), mesh.shard
                shard, trained = part.on_device(devices), trained_on_device(part, model, devices)
                added = trained * MASTER if model.train.lora else 0
                width, on_host = master(model), model.train.optimizer_offload
                if on_host:  # a CPU's own memory is the host's: masters stay beside the weights
                    on_host = self.cluster.device == "cuda"
                    width = WIDTH[model.train.dtype] + (0 if on_host else MASTER)
                if held := (0 if model.shares else shard * width) + added:
                    sizes[Item(name, "train", "parameters")] = held
                if not model.frozen and not on_host:
                    averages = averages_on_device(part, model, devices)
                    sizes[Item(name, "train", "optimizer")] = averages * MASTER
            if size and serve and self.plan.serves(name, pool) and not serve.addresses:
                sizes |= {Item(name, "serve", part): held for part, held in served_parts(size, model)}
                if serving(serve).own_servers:  # the cache is there while the server is awake
                    sizes[Item(name, "serve", "kv")] = cache_on_device(size, serve, WIDTH[serve.dtype])
        return sizes

    def _trains(self, model: str) -> bool:
        """Return whether a step works on the train engine of a model, or of one on its weights."""
        readers = {model, *(name for name, other in self.plan.models.items() if other.shares == model)}
        steps = (*self.plan.steps, *self.plan.eval_steps)
        return any("train" in step.engines and readers & step.models.keys() for step in steps)

    def needs(self, pool: str, step: Step) -> set[Item]:
        """Return what must be on a pool's devices in a step; of a region, in any of its steps."""
        steps = (*self.plan.steps, *self.plan.eval_steps)
        together = [other for other in steps if step.region and other.region == step.region] or [step]
        return set().union(*(self._needs(pool, one) for one in together))

    def _needs(self, pool: str, step: Step) -> set[Item]:
        items: set[Item] = set()
        for name in () if step.facts.moves or step.joins else step.models:
            if step.engine == "serve" and (step.pool == pool or (step.leaves and pool in self.plan.lenders)):
                parts = ("weights", "kv") if step.generates else ("weights",)
                items |= {Item(name, "serve", part) for part in parts}
            if (step.facts.syncs and pool == (step.source or step.pool)) or step.engine == "train":
                items |= {Item(n, "train", "parameters") for n in (name, self.plan.models[name].shares)}
            if step.updated == name:
                items.add(Item(name, "train", "optimizer"))
        return items & self.items(pool).keys()

    def transient(self, pool: str, step: Step) -> Counter[str]:
        """Return what a step needs on a pool beside what is resident; of a collect on a pool that is lent
        until then, what the rounds there do."""
        if step.facts.collects and pool in self.plan.lenders:
            lent = [other for other in self.plan.steps if other.leaves and other.region == step.region]
            step = lent[0]
        if not step.models or step.facts.moves or step.joins:
            return Counter()
        model, size = self.model_of(step)
        if step.facts.syncs:
            return Counter({"staging": self._syncing(pool, step)})
        if step.engine == "serve":
            assert model.serve
            if model.serve.addresses:
                return Counter()  # it is the servers' memory
            cut = self.plan.functions[step.phase][step.node].value("nucleus", 1.0) != 1.0
            rows = self.slots(step, growth(self.plan, step, self.work) * self.share(step, pool))
            return generating(size, model.serve, rows, self.work.most, cut)
        if step.copied:
            width, mesh = master(self.plan.models[step.copied]), self.plan.meshes[step.copied]
            return Counter({"staging": staging(size.tensors, mesh.shard, width, limits.BUCKET, mesh.parts)})
        return max(self.passing(step).values(), key=lambda parts: parts.total())

    def passing(self, step: Step) -> Moments:
        """Return the moments of a step's largest micro-batch."""
        micro_batch = self.micro_batch(step)
        return micro_batch.update() if step.updates else micro_batch.score()

    def micro_batch(self, step: Step) -> Pass:
        """Return the largest micro-batch of a step."""
        (model, size), most = self.model_of(step), self.work.most
        assert model.train
        passes = self.plan.passes(step)
        rows = max(self.rows(one.reads, one) * growth(self.plan, one, self.work) for one in passes)
        tokens = int(min(max(model.train.pass_tokens(step.updates), most), rows * most))
        mesh, own = self.plan.meshes[next(iter(step.models))], -(-tokens // model.train.sequence_parallel)
        ring = limits.ring_ranks(size.config.key_heads, model.train.sequence_parallel)
        beside = mask_bytes(model, size, tokens, int(most), self.cluster.device) // ring
        beside += own * max(bytes_beside(self.plan, one) for one in passes)
        offloads = model.train.activation_offload and self.cluster.device == "cuda"
        part, uneven = part_of(size, mesh.tensor), self.work.uneven(mesh.experts)
        return Pass(part, model, mesh.shard, own, beside, mesh.replicate, offloads, uneven)

    def _syncing(self, pool: str, step: Step) -> int:
        """Return the bytes of a weight sync on a device that sends, or on one that only receives."""
        model, size = self.model_of(step)
        assert model.train and model.serve
        width, lora = gathered_width(model), model.train.lora
        if alone := lora_size.syncing_alone(size, model):
            return alone
        served = WIDTH[model.serve.dtype]
        sent = min(size.parameters * served, max(limits.BUCKET, max(size.numbers) * served))
        if pool != (step.source or step.pool):
            return sent
        # a bucket is of one data type: where weights are narrower, adapters in float32 end it
        apart = lora_size.unadapted_runs(size, lora) if lora and width < MASTER else {size.tensors}
        mesh = self.plan.meshes[next(iter(step.models))]
        gathered = max(staging(t, mesh.shard, width, limits.BUCKET, mesh.parts) for t in apart)
        merged = lora_size.merging(size, lora, width, mesh.shard) if lora else 0
        # a bucket as it was gathered, cast where it was not before, and laid into one buffer
        handed = 0 if step.path == "memory" else sent * (2 if width == served else 2 + width // served)
        return max(gathered, merged, handed)

    def resident(self, pool: str, away: set[Item]) -> Counter[str]:
        """Return the parts of a device that engines hold, but for what is away."""
        held: Counter[str] = Counter({"reserve": int(self.cluster.reserve)})
        for item, size in self.items(pool).items():
            if item not in away:
                held[LABELS[item.part, item.engine]] += size
            if item.part == "kv" and self.cluster.device == "cuda":
                held["server"] += SERVER
        return held

    def moments(
        self, pool: str, steps: Iterable[Step], asked: Callable[[Step], bool] = lambda step: True
    ) -> Iterator[tuple[Step, Counter[str]]]:
        """Yield what a device of a pool holds in each step asked for, from between two iterations on."""
        away = set(away_items(self.plan, pool))
        for step in self.on(pool, steps):
            moved = {Item(name, step.engine, part) for name in step.models for part in step.parts}
            if step.facts.moves == "back":
                away -= moved
            if asked(step):
                yield step, self.resident(pool, away) + self.transient(pool, step)
            if step.facts.moves == "off":
                away |= moved

    def peaks(self) -> dict[str, Peak]:
        """Return the peak of each pool, over training and evaluation."""
        peaks, most = {}, int(self.cluster.memory)
        for pool in self.plan.pools:
            both = (self.in_order(), self.plan.eval_steps)
            moments = [(s.node, parts) for steps in both for s, parts in self.moments(pool, steps)]
            held = self.resident(pool, set(away_items(self.plan, pool)))
            name, parts = max(moments, key=lambda m: m[1].total(), default=("", held))
            ordered = {part: parts[part] for part in PARTS if parts[part]}
            peaks[pool] = Peak(sum(ordered.values()), most, name, ordered, free=most - self.cluster.usable)
        return peaks


LABELS = {
    ("parameters", "train"): "weights",
    ("optimizer", "train"): "optimizer",
    ("weights", "serve"): "serve weights",
    ("base", "serve"): "serve weights",
    ("adapters", "serve"): "adapters",
    ("kv", "serve"): "kv cache",
}


def away_items(plan: Plan, pool: str) -> Iterator[Item]:
    """Yield what is off a pool's devices between two iterations."""
    for model, engine in product(plan.models, ("train", "serve")):
        parts = plan.away.get(plan.held(model, engine, pool), ())
        yield from (Item(model, engine, part) for part in parts)


def master(model: ModelPlan) -> int:
    """Return the bytes of a weight in the train engine; beside an adapter it is as it is computed with."""
    assert model.train
    return WIDTH[model.train.dtype] if model.frozen or model.train.lora else MASTER


def gathered_width(model: ModelPlan) -> int:
    """Return the bytes of a weight that is gathered for a sync.

    Shards are cast before that where the serve engine holds less; but where adapters are merged, after it.
    """
    assert model.train and model.serve
    return master(model) if model.train.lora else min(master(model), WIDTH[model.serve.dtype])


def generating(size: Size, serve: ServePlan, rows: int, length: float, cut: bool = False) -> Counter[str]:
    """Return the parts of one engine: its slots at full length, sampling's copies of logits, a layer's work.

    The embedded engine has its cache only while it generates, and repeats keys and values of one layer for
    every query head while that runs. ``cut``: the rollout samples with ``top_p``, which sorts logits.
    """
    width, group = WIDTH[serve.dtype], serve.tensor_parallel
    prefill = limits.PREFILL * Layer(size, width).kept
    logits = rows * size.vocabulary * (width + (SORTED if cut else SAMPLING))
    if serving(serve).own_servers:
        return Counter({"logits": logits // group, "activations": prefill // group})
    repeated = 2 * rows * int(length) * size.config.queries * width
    cache = rows * int(size.cache_bytes(width, int(length)))
    return Counter({"kv cache": cache, "logits": logits, "activations": max(repeated, prefill)})
