"""Peak memory of a device in bytes, each of them attributed to a part, as engines come and go.

What an engine can put off the device is an ``EngineComponent``: the parameters and the optimizer of a train
engine, the weights of a serve engine. The counts follow the engines of ``runtime/``: float32 masters and
AdamW averages in shards; what a micro-batch takes at its worst moment (``moments``); a serve engine with all
weights on each device. Columns are small and left out.

One file, because what engines hold, what a step needs of it and what it takes in addition are one account.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from rlgraph.costs import limits, lora_size
from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.hardware import Cluster
from rlgraph.costs.layer_memory import Layer, mask_bytes, staging
from rlgraph.costs.lora_size import (
    dequantized,
    four_bit_bytes,
    quantizes,
    served_parts,
    shares_base,
    trained_on_device,
)
from rlgraph.costs.model_size import Size
from rlgraph.costs.optimizers import averages_on_device
from rlgraph.costs.plan_size import cache_on_device, part_of
from rlgraph.costs.train_memory import Moments, Pass
from rlgraph.costs.workload import Workload, bytes_beside, growth
from rlgraph.engines.registry import serving
from rlgraph.ir.actions import Collect, MoveEngine, RunOp, Sync
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


class EngineComponent(NamedTuple):
    """A part of an engine that it can put off its device, as ``("policy", "train", "optimizer")``."""

    model: str
    engine: Literal["train", "serve"]
    name: str


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
        return self.plan.models[step.model], self.sizes[step.model]

    def serve(self, model: str) -> ServePlan:
        """Return the engine that generates with a model."""
        serve = self.plan.models[model].serve
        assert serve
        return serve

    def rows(self, columns: Iterable[str], step: Step) -> float:
        """Return the rows of the longest of some columns; infinity for an evaluation, which has no bound."""
        most = 0.0
        for name in columns:
            domain = self.plan.columns[step.phase][name].domain
            most = max(most, self.work.rows.get(domain, math.inf))
        return most

    def server_rows(self, step: Step, ahead: bool = True) -> float:
        """Return the samples of one server, in whole prompts: all that are in flight, or an iteration's.

        Infinity for an evaluation, since nothing says how many it has.
        """
        if step.phase != "train":
            return math.inf
        samples = self.plan.domain(step.phase, step.writes[0])
        share = self.serve(step.model).tensor_parallel / len(step.devices)
        region = self.plan.regions.get(step.region) if ahead else None
        if region:
            share *= region.max_rows_in_flight / region.rows
        prompts = math.ceil(self.work.rows[samples.name] / samples.times * share)
        return prompts * samples.times

    def share(self, step: Step, pool: str) -> float:
        """Return the samples of a device of a lent pool, relative to a device of the step's own pool."""
        if pool == step.pool:
            return 1.0
        devices, lent_devices = len(step.devices), self.plan.pools[pool]
        return devices / (devices + lent_devices)

    def slots(self, step: Step, times: float = 1.0) -> int:
        """Return the samples in flight in an engine that has ``times`` the expected rows."""
        serve = self.serve(step.model)
        # a paged cache takes what a sample has so far; one that is not has room for the longest
        sample_tokens = self.work.mean if serving(serve).paged else self.work.most
        in_cache = int(serve.cache_tokens) // sample_tokens
        return int(max(1, min(self.server_rows(step) * times, serve.max_rows, in_cache)))

    def in_order(self) -> list[Step]:
        """Return the training steps in the order in which they run while the pipeline is full."""
        return [self.plan.steps[number - 1] for number in self.plan.slot]

    def items(self, pool: str) -> Mapping[EngineComponent, int]:
        """Return what the engines of a pool hold, in bytes of a device."""
        return self._items[pool]

    @cached_property
    def _items(self) -> dict[str, dict[EngineComponent, int]]:
        items: dict[str, dict[EngineComponent, int]] = {}
        for pool in self.plan.pools:
            items[pool] = {}
            for name in self.plan.models:
                size = self.sizes.get(name)
                if size is not None:
                    items[pool] |= self._train_items(name, size, pool)
                    items[pool] |= self._serve_items(name, size, pool)
        return items

    def _train_items(self, name: str, size: Size, pool: str) -> dict[EngineComponent, int]:
        """Return the shards of a model's train engine on a device of a pool; none unless it is there."""
        model = self.plan.models[name]
        train = model.train
        if train is None or train.pool != pool or not self._trains(name):
            return {}
        mesh = self.plan.meshes[name]
        size = part_of(size, mesh.tensor)
        optimizer_on_host = train.optimizer_offload and self.cluster.device == "cuda"
        weight_bytes = master(model)
        if train.optimizer_offload:
            weight_bytes = WIDTH[train.dtype]
            if not optimizer_on_host:
                # the memory of a CPU device is its host's, so masters are on it beside the weights
                weight_bytes += MASTER
        parameters = 0
        if not model.shares:
            if quantizes(model):
                parameters += four_bit_bytes(size, weight_bytes)
            else:
                parameters += size.on_device(mesh.shard) * weight_bytes
        if train.lora:
            parameters += trained_on_device(size, model, mesh.shard) * MASTER
        items: dict[EngineComponent, int] = {}
        if parameters:
            items[EngineComponent(name, "train", "parameters")] = parameters
        if not model.frozen and not optimizer_on_host:
            averages = averages_on_device(size, model, mesh.shard)
            items[EngineComponent(name, "train", "optimizer")] = averages * MASTER
        return items

    def _serve_items(self, name: str, size: Size, pool: str) -> dict[EngineComponent, int]:
        """Return the weights of a model's serve engine on a device of a pool; none unless it is there.

        Where an engine has servers of its own, their cache is there as long as they are awake.
        """
        model = self.plan.models[name]
        serve = model.serve
        if serve is None or serve.addresses or not self.plan.serves(name, pool):
            return {}
        items: dict[EngineComponent, int] = {}
        has_base_of_train_engine = shares_base(self.plan, name, pool)
        for label, nbytes in served_parts(size, model):
            if label == "base" and has_base_of_train_engine:
                continue
            items[EngineComponent(name, "serve", label)] = nbytes
        if serving(serve).own_servers:
            items[EngineComponent(name, "serve", "kv")] = cache_on_device(size, serve, WIDTH[serve.dtype])
        return items

    def _trains(self, model: str) -> bool:
        """Return whether a step works on the train engine of a model, or of one that shares its weights."""
        readers = {model}
        for name, sharer in self.plan.models.items():
            if sharer.shares == model:
                readers.add(name)
        for step in (*self.plan.steps, *self.plan.eval_steps):
            reads_weights = not readers.isdisjoint(step.models)
            if reads_weights and "train" in step.engines:
                return True
        return False

    def needs(self, pool: str, step: Step) -> set[EngineComponent]:
        """Return what must be on a pool's devices in a step; in a region, in any of the region's steps."""
        if not step.region:
            return self._needs_of(pool, step)
        items: set[EngineComponent] = set()
        for candidate in (*self.plan.steps, *self.plan.eval_steps):
            if candidate.region == step.region:
                items |= self._needs_of(pool, candidate)
        return items

    def _needs_of(self, pool: str, step: Step) -> set[EngineComponent]:
        items: set[EngineComponent] = set()
        match step.action:
            case Sync(model=model, source=source):
                if step.pool == pool:
                    items.add(EngineComponent(model, "serve", "weights"))
                if pool == (source or step.pool):
                    items |= self._parameters(model)
            case RunOp(engine="serve"):
                is_lent = step.unfinished > 0 and pool in self.plan.lenders
                if step.pool == pool or is_lent:
                    for name in step.models:
                        items |= {
                            EngineComponent(name, "serve", "weights"),
                            EngineComponent(name, "serve", "kv"),
                        }
                        if shares_base(self.plan, name, pool):
                            items |= self._parameters(name)
            case RunOp(engine="train", joins=""):
                for name in step.models:
                    items |= self._parameters(name)
                if step.updated:
                    items.add(EngineComponent(step.updated, "train", "optimizer"))
        return items & self.items(pool).keys()

    def _parameters(self, model: str) -> set[EngineComponent]:
        """Return the parameters of a train engine, and of the engine that holds its frozen ones, if any."""
        owner = self.plan.models[model].shares
        return {EngineComponent(model, "train", "parameters"), EngineComponent(owner, "train", "parameters")}

    def transient(self, pool: str, step: Step) -> Counter[str]:
        """Return what a step takes on a pool in addition to what is resident.

        A collect on a pool that is lent until then takes what the rounds there do.
        """
        if isinstance(step.action, Collect) and pool in self.plan.lenders:
            in_region = [candidate for candidate in self.plan.steps if candidate.region == step.region]
            step = next(candidate for candidate in in_region if candidate.unfinished)
        if isinstance(step.action, Sync):
            return Counter({"staging": self._syncing(pool, step, step.action)})
        run = step.run
        if run is None or run.joins or not run.models:
            return Counter()
        if run.engine == "serve":
            return self._generating(pool, step) + self._dequantized(pool, step)
        if run.copied:
            return Counter({"staging": self._copying(step)})
        return max(self.passing(step).values(), key=Counter.total) + self._dequantized(pool, step)

    def _dequantized(self, pool: str, step: Step) -> Counter[str]:
        """Return the weight that a layer brings from 4 bits into the type in which it computes."""
        model, size = self.model_of(step)
        owner = self.plan.models[model.shares] if model.shares else model
        if not quantizes(owner) or (step.generates and not shares_base(self.plan, step.model, pool)):
            return Counter()
        assert owner.train
        return Counter({"gathered weights": dequantized(size, WIDTH[owner.train.dtype])})

    def _generating(self, pool: str, step: Step) -> Counter[str]:
        model, size = self.model_of(step)
        assert model.serve
        if model.serve.addresses:
            return Counter()  # servers at addresses have memory of their own
        nucleus = self.plan.functions[step.phase][step.node].value("nucleus", 1.0)
        times = growth(self.plan, step, self.work) * self.share(step, pool)
        rows = self.slots(step, times)
        return generating(size, model.serve, rows, self.work.most, sorts=nucleus != 1.0)

    def _copying(self, step: Step) -> int:
        """Return the bytes that gathering takes when a step copies one model's weights onto another."""
        _, size = self.model_of(step)
        width, mesh = master(self.plan.models[step.copied]), self.plan.meshes[step.copied]
        return staging(size.tensors, mesh.shard, width, limits.BUCKET, mesh.parts)

    def passing(self, step: Step) -> Moments:
        """Return the moments of a step's largest micro-batch."""
        micro_batch = self.micro_batch(step)
        return micro_batch.update() if step.updated else micro_batch.score()

    def micro_batch(self, step: Step) -> Pass:
        """Return the largest micro-batch of a step."""
        model, size = self.model_of(step)
        train, mesh = model.train, self.plan.meshes[step.model]
        assert train
        longest = self.work.most
        rows, bytes_of_columns = 0.0, 0
        for term in self.plan.passes(step):
            rows = max(rows, self.rows(term.reads, term) * growth(self.plan, term, self.work))
            bytes_of_columns = max(bytes_of_columns, bytes_beside(self.plan, term))
        # a micro-batch has one row at least, and no more than there are
        limit = max(train.pass_tokens(bool(step.updated)), longest)
        tokens = int(min(limit, rows * longest))
        device_tokens = -(-tokens // train.sequence_parallel)
        ring = limits.ring_ranks(size.config.key_heads, train.sequence_parallel)
        mask = mask_bytes(model, size, tokens, int(longest), self.cluster.device) // ring
        columns = device_tokens * bytes_of_columns
        return Pass(
            size=part_of(size, mesh.tensor),
            model=model,
            devices=mesh.shard,
            tokens=device_tokens,
            mask=mask + columns,
            replicas=mesh.replicate,
            offloads=train.activation_offload and self.cluster.device == "cuda",
            uneven=self.work.uneven(mesh.experts),
        )

    def _syncing(self, pool: str, step: Step, sync: Sync) -> int:
        """Return the bytes of a weight sync on a device that sends, or on one that only receives."""
        model, size = self.model_of(step)
        assert model.train and model.serve
        adapter_only = lora_size.syncing_alone(size, model)
        if adapter_only:
            return adapter_only
        gathered, served = gathered_width(model), WIDTH[model.serve.dtype]
        largest_bucket = max(limits.BUCKET, max(size.numbers) * served)
        bucket = min(size.parameters * served, largest_bucket)
        is_sender = pool == (sync.source or step.pool)
        if not is_sender:
            return bucket
        mesh, lora = self.plan.meshes[sync.model], model.train.lora
        runs, merging = {size.tensors}, 0
        if lora:
            merging = lora_size.merging(size, lora, gathered, mesh.shard)
            if gathered < MASTER:
                # a bucket has one data type: adapters in float32 end it if the weights are narrower
                runs = lora_size.unadapted_runs(size, lora)
        gathering = 0
        for run in runs:
            gathering = max(gathering, staging(run, mesh.shard, gathered, limits.BUCKET, mesh.parts))
        return max(gathering, merging, self._sending(sync, bucket, gathered, served))

    def _sending(self, sync: Sync, bucket: int, gathered: int, served: int) -> int:
        """Return the bytes of a bucket on its way: as it was gathered, cast, and laid into one buffer."""
        if sync.path == "memory":
            return 0
        if gathered == served:
            return bucket * 2
        return bucket * (2 + gathered // served)

    def resident(self, pool: str, off_device: set[EngineComponent]) -> Counter[str]:
        """Return what engines hold on a device, part by part, without the items that are off it."""
        sizes: Counter[str] = Counter({"reserve": int(self.cluster.reserve)})
        for item, nbytes in self.items(pool).items():
            if item not in off_device:
                sizes[LABELS[item.name, item.engine]] += nbytes
            if item.name == "kv" and self.cluster.device == "cuda":
                sizes["server"] += SERVER
        return sizes

    def moments(
        self, pool: str, steps: Iterable[Step], selects: Callable[[Step], bool] = lambda step: True
    ) -> Iterator[tuple[Step, Counter[str]]]:
        """Yield what a device of a pool holds in each selected step, from between two iterations on.

        Items are on the device in the whole of a step that moves them, whichever way.
        """
        off_device = set(away_items(self.plan, pool))
        for step in self.on(pool, steps):
            move = step.action if isinstance(step.action, MoveEngine) else None
            if move and move.direction == "back":
                off_device -= _moved_items(move)
            if selects(step):
                yield step, self.resident(pool, off_device) + self.transient(pool, step)
            if move and move.direction == "off":
                off_device |= _moved_items(move)

    def peaks(self) -> dict[str, Peak]:
        """Return the peak of each pool, over training and evaluation."""
        capacity = int(self.cluster.memory)
        peaks = {}
        for pool in self.plan.pools:
            node = ""
            sizes = self.resident(pool, set(away_items(self.plan, pool)))
            moments = [*self.moments(pool, self.in_order()), *self.moments(pool, self.plan.eval_steps)]
            if moments:
                step, sizes = max(moments, key=lambda moment: moment[1].total())
                node = step.node
            ordered = {label: sizes[label] for label in PARTS if sizes[label]}
            free = capacity - self.cluster.usable
            peaks[pool] = Peak(sum(ordered.values()), capacity, node, ordered, free=free)
        return peaks


def _moved_items(move: MoveEngine) -> set[EngineComponent]:
    return {EngineComponent(move.model, move.engine, part) for part in move.parts}


LABELS = {
    ("parameters", "train"): "weights",
    ("optimizer", "train"): "optimizer",
    ("weights", "serve"): "serve weights",
    ("base", "serve"): "serve weights",
    ("adapters", "serve"): "adapters",
    ("kv", "serve"): "kv cache",
}


def away_items(plan: Plan, pool: str) -> Iterator[EngineComponent]:
    """Yield what is off a pool's devices between two iterations."""
    for model in plan.models:
        for label in plan.away.get(plan.engine_key(model, "train", pool), ()):
            yield EngineComponent(model, "train", label)
        for label in plan.away.get(plan.engine_key(model, "serve", pool), ()):
            yield EngineComponent(model, "serve", label)


def master(model: ModelPlan) -> int:
    """Return the bytes of a weight in the train engine.

    Weights that do not train, those below an adapter among them, are in the type of computation.
    """
    assert model.train
    if model.frozen or model.train.lora:
        return WIDTH[model.train.dtype]
    return MASTER


def gathered_width(model: ModelPlan) -> int:
    """Return the bytes of a weight that is gathered for a sync.

    Shards are cast before gathering if the serve engine has a narrower type. Adapters are merged first, so
    that their weights are cast after it.
    """
    assert model.train and model.serve
    if model.train.lora:
        return master(model)
    return min(master(model), WIDTH[model.serve.dtype])


def generating(size: Size, serve: ServePlan, rows: int, length: float, sorts: bool = False) -> Counter[str]:
    """Return the parts of one engine: its slots at full length, sampling's copies of logits, a layer's work.

    The embedded engine has its cache only while it generates, and repeats keys and values of one layer for
    every query head while that runs. ``sorts``: the rollout samples with ``top_p``, which sorts logits.
    """
    width, group = WIDTH[serve.dtype], serve.tensor_parallel
    prefill = limits.PREFILL * Layer(size, width).kept
    sampling = SORTED if sorts else SAMPLING
    logits = rows * size.vocabulary * (width + sampling)
    if serving(serve).own_servers:
        return Counter({"logits": logits // group, "activations": prefill // group})
    repeated = 2 * rows * int(length) * size.config.queries * width
    cache = rows * int(size.cache_bytes(width, int(length)))
    return Counter({"kv cache": cache, "logits": logits, "activations": max(repeated, prefill)})
