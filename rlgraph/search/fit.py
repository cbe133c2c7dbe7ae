"""The goal *fit*: the cheapest changes with which a plan fits on its devices.

A *lever* is one kind of change, from its mildest form to its strongest: precision, groups of devices,
micro-batches, recomputation, caches and rows of servers, offloads. If single levers make the plan fit, these
are offered. If none does, all are pulled; those that are not needed are released, the dearest first, each
time with another one kept. More devices are offered as well. Whether a change fits is a question of memory
alone; what fits is then evaluated as a user types it, and the fastest comes first.

On GPUs every change is one of a plan in bfloat16: float32 takes twice the memory and many times the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlgraph.costs.memory import Footprint
from rlgraph.costs.pricing import sizes_of
from rlgraph.engines.registry import EMBEDDED
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, TrainPlan
from rlgraph.planning.device_groups import has_groups, sharing_sizes
from rlgraph.planning.host_memory import fits
from rlgraph.planning.model_limits import dividing, sharing
from rlgraph.planning.offload import reside
from rlgraph.planning.predict import DoesNotFitError, predict
from rlgraph.search import goals
from rlgraph.search.candidate import Candidate, Remedy
from rlgraph.search.evaluate import Evaluator
from rlgraph.search.moves import (
    Settings,
    applied,
    division_sizes,
    group_sizes,
    halvings,
    in_every_model,
    in_graph_order,
    may_share_base,
    with_pools,
)
from rlgraph.search.text import host_text, remedies_text
from rlgraph.syntax.yaml_text import overrides

MOST_DEVICES = 2**14  # that a remedy may ask for
LEAST_TOKENS, LEAST_ROWS = 1024, 8  # of micro-batches and of servers: remedies suggest no less
EVEN = 0.05  # times that differ by a smaller share are equal: rates are not known so well
OFFERED = 5  # remedies on the same devices that an error lists
STRONGEST = 2**14  # beyond the number of strengths of any lever
STRENGTHS = 32  # of a lever that are tried one by one
BFLOAT16: Mapping[str, Any] = {"serve.dtype": "bfloat16", "train.dtype": "bfloat16"}
RECOMPUTED: Mapping[str, Any] = {"train.recompute": True}
INPUTS_ON_HOST: Mapping[str, Any] = {**RECOMPUTED, "train.activation_offload": True}

Lever = Callable[[Footprint], Iterable[Settings]]  # settings from the mildest to the strongest


def with_remedies(
    error: DoesNotFitError, evaluator: Evaluator, open_settings: Collection[str] = ()
) -> GraphError:
    """Return the refusal of a plan together with the changes that would make it fit.

    ``open_settings`` are those that are chosen where hosts are more or fewer, as ``choose`` takes them.
    """
    (problem,) = error.problems
    memory = MemoryTest(replace(error.pricing, plan=error.unmoved))
    fitting = remedies(memory, evaluator)
    lines = [remedies_text(fitting), *_one_host_more_or_less(fitting, evaluator, open_settings)]
    return GraphError([replace(problem, remedy="\n".join(lines))])


def choose(error: DoesNotFitError, evaluator: Evaluator, open_settings: Collection[str]) -> Candidate | None:
    """Return the plan that is fastest with settings that a graph leaves open, where it does not fit without.

    Of settings whose times differ by less than ``EVEN``, the mildest are taken. None: nothing fits.

    Args:
        error: the refusal of the plan as it is.
        evaluator: of the graph.
        open_settings: paths of the settings that may be chosen; all others stay as they are.
    """
    footprint = replace(error.pricing, plan=error.unmoved)
    levers = [lever for lever in LEVERS if lever is not precision]  # which alters results
    memory = MemoryTest(footprint, levers, open_settings)
    plan = memory.footprint.plan
    candidates = []
    for settings in fitting_changes(memory):
        if "pools" in settings:
            continue
        candidate = evaluator.candidate(in_graph_order(plan, settings))
        if candidate.fits:
            candidates.append(candidate)
    return fastest(candidates)


def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the first of some candidates, the mildest first, that is nearly as fast as the fastest."""
    least = min((candidate.seconds for candidate in candidates), default=math.inf)
    for candidate in candidates:
        if candidate.seconds <= least * (1 + EVEN):
            return candidate
    return None


def remedies(memory: MemoryTest, evaluator: Evaluator) -> list[Remedy]:
    """Return the changes with which the plan fits: on its own devices the fastest first, then on more.

    Of changes of the same settings, as servers over 2, 4 or 8 devices, it is the fastest.
    """
    best = []
    for alternatives in _remedies_by_settings(memory, evaluator):
        winner = fastest([remedy.candidate for remedy in alternatives])
        for remedy in alternatives:
            if remedy.candidate is winner:
                best.append(remedy)
                break
    best.sort(key=lambda remedy: goals.cheaper(remedy.candidate))
    on_same = [remedy for remedy in best if remedy.devices is None]
    on_more = [remedy for remedy in best if remedy.devices is not None]
    return [*on_same[:OFFERED], *on_more[:1]]


def _remedies_by_settings(memory: MemoryTest, evaluator: Evaluator) -> list[list[Remedy]]:
    """Return the changes with which the plan fits as a user types them, together if of the same settings."""
    by_settings: dict[tuple[str, ...], list[Remedy]] = {}
    for settings in fitting_changes(memory):
        remedy = _evaluated(settings, memory.footprint.plan, evaluator)
        if not remedy.candidate.fits:
            continue
        on_more_devices = str(remedy.devices or "")
        kind = (on_more_devices, *sorted(remedy.candidate.settings))
        by_settings.setdefault(kind, []).append(remedy)
    return list(by_settings.values())


def _one_host_more_or_less(
    fitting: Sequence[Remedy], evaluator: Evaluator, open_settings: Collection[str]
) -> Iterator[str]:
    """Yield what one host more would change for a plan that does not fit, and one less for the first of the
    changes with which it fits. Pools of fixed sizes gain and lose nothing: then there is no line."""
    cluster = evaluator.scenario.cluster
    on_same = [remedy.candidate.settings for remedy in fitting if remedy.devices is None]
    changes: list[tuple[int, Settings]] = [(cluster.hosts + 1, {})]
    if on_same and cluster.hosts > 1:
        changes.append((cluster.hosts - 1, on_same[0]))
    for hosts, settings in changes:
        devices = hosts * cluster.devices
        candidate = _fitting(evaluator.on_hosts(hosts), settings, open_settings)
        if candidate.plan is None or candidate.devices == devices:
            yield host_text(hosts, devices, candidate)


def _fitting(evaluator: Evaluator, settings: Settings, open_settings: Collection[str]) -> Candidate:
    """Return the plan with some settings and, where it does not fit, with those that are chosen for it."""
    candidate = evaluator.candidate(settings)
    if candidate.plan is None or candidate.fits:
        return candidate
    try:
        predict(evaluator.plan(settings), evaluator.scenario)
    except DoesNotFitError as error:
        with_settings = replace(evaluator, chosen={**evaluator.chosen, **settings}, cache={})
        return choose(error, with_settings, open_settings) or candidate
    except GraphError:  # its hosts lack memory
        pass
    return candidate


def _evaluated(settings: Settings, plan: Plan, evaluator: Evaluator) -> Remedy:
    """Return a change with its candidate, evaluated as a user types it."""
    typed = dict(in_graph_order(plan, settings))
    pools = typed.pop("pools", None)
    if pools is None:
        return Remedy(evaluator.candidate(typed))
    sizes = {name: pool["devices"] for name, pool in pools.items()}
    devices = sum(sizes.values())
    on_more = evaluator.on(devices)
    candidate = on_more.candidate(typed)
    graph_fixes_sizes = candidate.plan is None or candidate.plan.pools != sizes
    if graph_fixes_sizes:
        resized = {f"pools.{name}.devices": count for name, count in sizes.items()}
        candidate = on_more.candidate({**typed, **resized})
    return Remedy(candidate, devices)


class MemoryTest:
    """Tests whether a plan with other settings fits on its devices and hosts: memory alone, without prices.

    ``levers`` are those that may be pulled, and ``open_settings`` the paths that they may set; None: any.

    Invariants:
        - Settings are always those of ``footprint.plan``, never changes of a plan that was changed before.
        - The same settings are tested once.
    """

    def __init__(
        self,
        footprint: Footprint,
        levers: Sequence[Lever] | None = None,
        open_settings: Collection[str] | None = None,
    ) -> None:
        self.footprint = footprint
        self.levers = LEVERS if levers is None else tuple(levers)
        self.open_settings = open_settings
        self._verdicts: dict[tuple[str, ...], bool] = {}

    def changed(self, settings: Settings) -> Footprint:
        """Return the memory of the plan with these settings."""
        return replace(self.footprint, plan=applied(self.footprint.plan, settings))

    def fits(self, settings: Settings) -> bool:
        """Return whether the plan fits with these settings, with engines off their devices if that helps."""
        key = tuple(sorted(overrides(settings)))
        if key not in self._verdicts:
            footprint = self.changed(settings)
            footprint = replace(footprint, sizes=sizes_of(footprint.plan))
            plan = reside(footprint)
            self._verdicts[key] = fits(replace(footprint, plan=plan))
        return self._verdicts[key]

    def choices(self, lever: Lever, settings: Settings) -> Iterator[Settings]:
        """Yield the choices of a lever that change the plan with these settings, the mildest first."""
        for choice in lever(self.changed(settings)):
            allowed = {path: value for path, value in choice.items() if self._may_set(path)}
            if allowed:
                yield allowed

    def _may_set(self, path: str) -> bool:
        return self.open_settings is None or path in self.open_settings

    def first_fitting(self, choices: Iterable[Settings]) -> Settings | None:
        """Return the first of some settings with which the plan fits."""
        for settings in choices:
            if self.fits(settings):
                return settings
        return None


def fitting_changes(memory: MemoryTest) -> Iterator[Settings]:
    """Yield settings with which the plan fits, the mildest first; of levers that are not faster when they are
    pulled further, the mildest alone."""
    start: Settings = {}
    if memory.footprint.cluster.device == "cuda" and precision in memory.levers:
        start = in_every_model(memory.footprint.plan, BFLOAT16)
    if start and memory.fits(start):
        yield start
        return
    singles = _single_levers(memory, start)
    if singles:
        yield from singles
    else:
        yield from _combinations(memory, start)
    larger = memory.first_fitting(_on_more_devices(memory, start))
    if larger is not None:
        yield larger
    elif not singles:
        yield from _combinations_on_more_devices(memory, start)


def _single_levers(memory: MemoryTest, start: Settings) -> list[Settings]:
    """Return the settings that fit of each lever that is enough by itself."""
    fitting: list[Settings] = []
    for lever in memory.levers:
        for choice in memory.choices(lever, start):
            settings = {**start, **choice}
            if not memory.fits(settings):
                continue
            fitting.append(settings)
            if lever not in SPREADING:
                break
    return fitting


def _combinations_on_more_devices(memory: MemoryTest, start: Settings) -> Iterator[Settings]:
    """Yield settings of several levers that fit on as few more devices as will do with all levers."""
    with_all = _pulled(memory, start, memory.levers, {})
    larger = memory.first_fitting(_on_more_devices(memory, with_all))
    if larger is not None:
        yield from _combinations(memory, {**start, "pools": larger["pools"]})


def _combinations(memory: MemoryTest, start: Settings) -> Iterator[Settings]:
    """Yield settings of several levers that fit: each has a lever that those before it do not need. Then they
    come with those of ``SPREADING`` pulled further."""
    needed: set[Lever] = set()
    for favourite in memory.levers:
        if favourite in needed:
            continue
        changes_something = any(memory.choices(favourite, start))
        if not changes_something:
            continue
        levers = _needed_with(memory, start, favourite)
        if not levers:
            continue
        needed.update(levers)
        mildest = _mildest(memory, start, levers)
        yield mildest
        yield from _spread_further(memory, mildest)


def _spread_further(memory: MemoryTest, settings: Settings) -> Iterator[Settings]:
    """Yield settings that fit, with one more lever of those that may be faster when pulled further."""
    for lever in SPREADING:
        if lever not in memory.levers:
            continue
        for choice in memory.choices(lever, settings):
            further = {**settings, **choice}
            if memory.fits(further):
                yield further


def _needed_with(memory: MemoryTest, start: Settings, favourite: Lever) -> list[Lever]:
    """Return the levers that are needed where one is released last; none if even all of them do not fit."""
    by_price = [lever for lever in memory.levers if lever is not favourite]
    needed = [favourite, *by_price]
    if not memory.fits(_pulled(memory, start, needed, {})):
        return []
    for released in (*reversed(by_price), favourite):  # the dearest is released first
        fewer = [lever for lever in needed if lever is not released]
        if memory.fits(_pulled(memory, start, fewer, {})):
            needed = fewer
    return needed


def _mildest(memory: MemoryTest, start: Settings, levers: Sequence[Lever]) -> Settings:
    """Return the settings of levers that are each pulled no further than needed, one after the other."""
    strengths: dict[Lever, int] = {}
    for lever in levers:
        for strength in (*range(STRENGTHS), STRONGEST):
            weaker = {**strengths, lever: strength}
            if memory.fits(_pulled(memory, start, levers, weaker)):
                strengths = weaker
                break
    return _pulled(memory, start, levers, strengths)


def _pulled(
    memory: MemoryTest, start: Settings, levers: Sequence[Lever], strengths: Mapping[Lever, int]
) -> Settings:
    """Return the settings of some levers, each pulled as far as its strength says, or all the way."""
    settings = dict(start)
    for lever in levers:
        choices = [*memory.choices(lever, settings)]
        if choices:
            strength = min(strengths.get(lever, STRONGEST), len(choices) - 1)
            settings |= choices[strength]
    return settings


def _on_more_devices(memory: MemoryTest, settings: Settings) -> Iterator[Settings]:
    """Yield settings with twice the devices in every pool, and twice as many again."""
    pools = memory.footprint.plan.pools
    factor = 2
    while sum(pools.values()) * factor <= MOST_DEVICES:
        sizes = {name: count * factor for name, count in pools.items()}
        yield {**settings, **with_pools(sizes)}
        factor *= 2


def precision(footprint: Footprint) -> Iterator[Settings]:
    """Yield bfloat16 for serving, for training, for both."""
    for values in ({"serve.dtype": "bfloat16"}, {"train.dtype": "bfloat16"}, BFLOAT16):
        yield in_every_model(footprint.plan, values)


def larger_groups(footprint: Footprint) -> Iterator[Settings]:
    """Yield servers that span more devices of a host."""
    plan = footprint.plan
    for size in group_sizes(footprint.cluster.devices):
        settings = {}
        for name, model in plan.models.items():
            serve = model.serve
            if serve is None or not has_groups(model):
                continue
            is_larger = serve.tensor_parallel < size
            fills_pool = plan.pools[serve.pool] % size == 0
            if is_larger and fills_pool:
                settings[f"models.{name}.serve.tensor_parallel"] = size
        yield settings


def smaller_micro_batches(footprint: Footprint) -> Iterator[Settings]:
    """Yield fewer tokens per micro-batch."""
    yield from halvings(footprint.plan, "train.micro_tokens", LEAST_TOKENS)


def whole_shards(footprint: Footprint) -> Iterator[Settings]:
    """Yield models that are sharded over all devices of their pool, in place of replicas."""
    yield in_every_model(footprint.plan, {"train.shard": None})


def divided_experts(footprint: Footprint) -> Iterator[Settings]:
    """Yield experts of mixtures that devices of a host divide."""
    yield from _divided(footprint, "expert_parallel")


def divided_layers(footprint: Footprint) -> Iterator[Settings]:
    """Yield layers of models other than mixtures that devices of a host divide."""
    yield from _divided(footprint, "tensor_parallel")


def _divided(footprint: Footprint, setting: str) -> Iterator[Settings]:
    plan = footprint.plan
    for ranks in division_sizes(plan, setting, footprint.cluster.devices):
        settings = {}
        for name in dividing(plan, setting, ranks):
            train = _train(plan, name)
            devices = train.shard or plan.pools[train.pool]
            is_larger = getattr(train, setting) < ranks
            if is_larger and devices % ranks == 0:
                settings[f"models.{name}.train.{setting}"] = ranks
        yield settings


def shared_rows(footprint: Footprint) -> Iterator[Settings]:
    """Yield rows of every model that trains shared by more devices, of a host and then of several."""
    plan = footprint.plan
    for ranks in sharing_sizes(plan, footprint.cluster.devices):
        settings = {}
        for name in sharing(plan):
            train = _train(plan, name)
            is_larger = train.sequence_parallel < ranks
            if is_larger and plan.pools[train.pool] % ranks == 0:
                settings[f"models.{name}.train.sequence_parallel"] = ranks
        yield settings


def _train(plan: Plan, model: str) -> TrainPlan:
    train = plan.models[model].train
    assert train
    return train


def recomputed_activations(footprint: Footprint) -> Iterator[Settings]:
    """Yield activations computed again, and on GPUs on the host: a CPU's memory is the host's."""
    yield in_every_model(footprint.plan, RECOMPUTED)
    if footprint.cluster.device == "cuda":
        yield in_every_model(footprint.plan, INPUTS_ON_HOST)


def smaller_caches(footprint: Footprint) -> Iterator[Settings]:
    """Yield smaller caches, which still hold the longest sample in every copy of attention."""
    copies = 1
    for model in footprint.plan.models.values():
        if model.serve:
            copies = max(copies, model.serve.attention_replicas)
    least = math.ceil(footprint.work.most) * copies
    yield from halvings(footprint.plan, "serve.cache_tokens", least)


def fewer_rows(footprint: Footprint) -> Iterator[Settings]:
    """Yield fewer rows that a server generates at a time."""
    yield from halvings(footprint.plan, "serve.max_rows", LEAST_ROWS)


def optimizer_on_host(footprint: Footprint) -> Iterator[Settings]:
    """Yield optimizers on the host, on GPUs."""
    if footprint.cluster.device == "cuda":
        yield in_every_model(footprint.plan, {"train.optimizer_offload": True})


def shared_bases(footprint: Footprint) -> Iterator[Settings]:
    """Yield the engine that generates in the worker, for models that then hold frozen weights once."""
    plan = footprint.plan
    settings = {}
    for name in plan.models:
        if may_share_base(plan, name):
            settings[f"models.{name}.serve.engine"] = EMBEDDED
    yield settings


# those that cost the least time first
LEVERS: tuple[Lever, ...] = (
    precision,
    larger_groups,
    smaller_micro_batches,
    whole_shards,
    divided_experts,
    shared_rows,
    recomputed_activations,
    smaller_caches,
    fewer_rows,
    divided_layers,
    shared_bases,
    optimizer_on_host,
)
# pulled further than needed, they may be faster: more devices do the work of one
SPREADING: tuple[Lever, ...] = (larger_groups, divided_experts, shared_rows)
