"""A plan that does not fit on its devices: where the memory goes, and the cheapest changes that would fit.

A *lever* is a kind of change, from its mildest to its strongest: recomputation, offloads, micro-batches, rows
and caches of servers, groups of devices, precision. What one lever alone makes fit is told; where none does,
all are pulled, and those let go that are not needed, the dearest first, each time with another one held. More
devices are told beside. Each change is priced as the plan that it gives, and the fastest come first.

On GPUs every change is of a plan in bfloat16: float32 takes twice the memory and many times the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlgraph.costs.memory import Footprint
from rlgraph.costs.muon import may_step_on_host
from rlgraph.costs.pricing import sizes_of
from rlgraph.engines.registry import OFFLOADS
from rlgraph.errors import GraphError, Problem
from rlgraph.ir.plan import ModelPlan, Plan, Step
from rlgraph.ir.steps import ONE
from rlgraph.planning.auto_settings import with_settings
from rlgraph.planning.device_groups import GROUPS, has_groups, sharing_sizes
from rlgraph.planning.host_memory import fits
from rlgraph.planning.model_limits import dividing, sharing
from rlgraph.planning.offload import reside
from rlgraph.printing.plan_text import memory_text
from rlgraph.syntax.yaml_text import flow
from rlgraph.units import middle, range_text, size_text

MOST = 2**14  # devices that a remedy may ask for
LEAST_TOKENS, LEAST_ROWS = 1024, 8  # remedies suggest no less
TOLD = 5  # changes that are told
TRIED = 32  # no lever has more than so many plans
BFLOAT16 = {"serve.dtype": "bfloat16", "train.dtype": "bfloat16"}
RECOMPUTED = {"train.recompute": True}
ON_HOST = {"train.optimizer_offload": True}
INPUTS_ON_HOST: Mapping[str, Any] = {**RECOMPUTED, "train.activation_offload": True}
Lever = Callable[[Footprint], Iterable[Plan]]  # the plans that it gives, from the mildest to the strongest
Price = Callable[
    [Plan], tuple[float, float] | None
]  # seconds of an iteration; None: it does not fit after all


def refuse(footprint: Footprint, before: Plan, price: Price) -> GraphError:
    """Return the error: the table of a plan with every move of engines that helps, and what would fit.

    ``before`` is the plan without these moves; ``price`` predicts a changed one.
    """
    peak, plan, cluster = footprint.peaks(), footprint.plan, footprint.cluster
    pool, worst = max(peak.items(), key=lambda item: item[1].lacks)
    law = f"{plan.graph} does not fit on {cluster.cluster}: a device of pool {pool} needs "
    law += f"{size_text(worst.bytes)} in `{worst.step}` and has {size_text(worst.capacity)}"
    law += f", of which {size_text(worst.free)} stay free" * bool(worst.free)
    changes = "\n    or ".join(remedies(replace(footprint, plan=before), price))
    remedy = f"what would make it fit:\n    {changes}"
    if not changes:
        remedy = "no change of one pool makes it fit: --autoplace tries several, or take a smaller model"
    return GraphError([Problem("does-not-fit", law, remedy=remedy, drawing="\n".join(memory_text(peak)))])


def remedies(footprint: Footprint, price: Price) -> list[str]:
    """Return the changes that make the plan fit, the fastest first, each with its time."""
    plan = footprint.plan
    priced: list[tuple[float, str, tuple[float, float]]] = []
    for changed in _changes(footprint):
        words = _words(plan, changed)
        if words not in [told for _, told, _ in priced] and (seconds := price(changed)):
            priced.append((middle(seconds), words, seconds))
    # those on the same devices come before more of them
    priced.sort(key=lambda item: ("devices" in item[1], item[0]))
    few = [item for item in priced if "devices" not in item[1]][:TOLD]
    more = [item for item in priced if "devices" in item[1]][:1]
    return [f"{words}  # {range_text(seconds)} per iteration" for _, words, seconds in (*few, *more)]


def _changes(footprint: Footprint) -> Iterator[Plan]:
    """Yield plans that fit; of each kind the mildest."""
    base = footprint.plan
    if footprint.cluster.device == "cuda":
        base = next(_tried(base, BFLOAT16), base)
        if base != footprint.plan and _fits(footprint, base):
            yield base
            return
    footprint = replace(footprint, plan=base)
    alone = [plan for lever in LEVERS if (plan := _first(footprint, lever(footprint)))]
    yield from alone or _several(footprint)
    if larger := _first(footprint, _devices(base)):
        yield larger
    elif not alone and (larger := _first(footprint, _devices(_pulled(footprint, LEVERS, {})))):
        factor = sum(larger.pools.values()) // sum(base.pools.values())
        yield from _several(replace(footprint, plan=_more_devices(base, factor)))


def _several(footprint: Footprint) -> Iterator[Plan]:
    """Yield plans that fit by several levers: each holds one that those before do not need."""
    needed: set[Lever] = set()
    for held in LEVERS:
        if held in needed or not [*held(footprint)]:
            continue
        pulled = [held, *(lever for lever in LEVERS if lever is not held)]
        if not _fits(footprint, _pulled(footprint, pulled, {})):
            continue
        for lever in (*(other for other in reversed(LEVERS) if other is not held), held):
            fewer = [other for other in pulled if other is not lever]
            if _fits(footprint, _pulled(footprint, fewer, {})):
                pulled = fewer
        needed |= {*pulled}
        yield _mildest(footprint, pulled)


def _mildest(footprint: Footprint, levers: Sequence[Lever]) -> Plan:
    """Return the plan with each of some levers no further than it has to be, one after the other."""
    strength: dict[Lever, int] = {}
    for lever in levers:
        tries = ({**strength, lever: at} for at in (*range(TRIED), MOST))
        strength = next(tried for tried in tries if _fits(footprint, _pulled(footprint, levers, tried)))
    return _pulled(footprint, levers, strength)


def _pulled(footprint: Footprint, levers: Sequence[Lever], strength: Mapping[Lever, int]) -> Plan:
    """Return the plan with some levers pulled, each as far as is said, or all the way."""
    for lever in levers:
        if plans := [*lever(footprint)]:
            footprint = replace(footprint, plan=plans[min(strength.get(lever, MOST), len(plans) - 1)])
    return footprint.plan


def _first(footprint: Footprint, plans: Iterable[Plan]) -> Plan | None:
    return next((plan for plan in plans if _fits(footprint, plan)), None)


def _fits(footprint: Footprint, plan: Plan) -> bool:
    """Return whether a plan fits, with engines off their devices where that helps."""
    laid = replace(footprint, plan=plan, sizes=sizes_of(plan))
    return fits(replace(laid, plan=reside(laid)))


def _words(plan: Plan, changed: Plan) -> str:
    """Return what to type for a changed plan: more devices, and settings of its models."""
    words = [f"{sum(changed.pools.values())} devices with"] * (changed.pools != plan.pools)
    for name, model in changed.models.items():
        for engine in ("train", "serve"):
            before, now = getattr(plan.models[name], engine), getattr(model, engine)
            fields = (
                (key for key in type(now).model_fields if getattr(now, key) != getattr(before, key))
                if now
                else ()
            )
            words += [f"models.{name}.{engine}.{key}={flow(getattr(now, key))}" for key in fields]
    return " ".join(words).removesuffix(" with")


def _groups(footprint: Footprint) -> Iterator[Plan]:
    """Yield servers that span more devices of a host."""
    plan, host = footprint.plan, footprint.cluster.devices
    serves = {name: model.serve for name, model in plan.models.items() if model.serve and has_groups(model)}
    for size in (size for size in GROUPS if host % size == 0):
        fewer = {name: serve for name, serve in serves.items() if serve.tensor_parallel < size}
        if names := [name for name, serve in fewer.items() if plan.pools[serve.pool] % size == 0]:
            yield with_settings(plan, "serve", {name: {"tensor_parallel": size} for name in names})


def _sharing(footprint: Footprint) -> Iterator[Plan]:
    """Yield the rows of every model that trains shared by more devices, of a host and then of several."""
    plan = footprint.plan
    trains = {name: train for name in sharing(plan) if (train := plan.models[name].train)}
    for ranks in sharing_sizes(plan, footprint.cluster.devices):
        fewer = {name: train.pool for name, train in trains.items() if train.sequence_parallel < ranks}
        if names := [name for name, pool in fewer.items() if plan.pools[pool] % ranks == 0]:
            yield with_settings(plan, "train", {name: {"sequence_parallel": ranks} for name in names})


def _dividing(footprint: Footprint, setting: str) -> Iterator[Plan]:
    """Yield experts of mixtures, or layers of other models, divided among more devices of a host."""
    plan = footprint.plan

    def may(name: str, ranks: int) -> bool:
        train = plan.models[name].train
        devices = train and (train.shard or plan.pools[train.pool])
        return bool(devices and devices % ranks == 0 and getattr(train, setting) < ranks)

    for ranks in (size for size in GROUPS[1:] if footprint.cluster.devices % size == 0):
        if names := [name for name in dividing(plan, setting, ranks) if may(name, ranks)]:
            yield with_settings(plan, "train", {name: {setting: ranks} for name in names})


def _devices(plan: Plan) -> Iterator[Plan]:
    total, factor = sum(plan.pools.values()), 2
    while total * factor <= MOST:
        yield _more_devices(plan, factor)
        factor *= 2


def _tried(plan: Plan, *several: Mapping[str, Any]) -> Iterator[Plan]:
    """Yield the plan with some settings, and with others, in every model that they change."""
    for settings in several:
        models = {name: _set(model, settings) for name, model in plan.models.items()}
        if models != plan.models:
            yield replace(plan, models=models)


def _set(model: ModelPlan, settings: Mapping[str, Any]) -> ModelPlan:
    for path, value in settings.items():
        engine, name = path.split(".")
        held = getattr(model, engine)
        # what is frozen never goes backward
        backward = name in ("recompute", *OFFLOADS)
        refused = name == "optimizer_offload" and not may_step_on_host(model)
        again = refused or (backward and (model.frozen or (held and getattr(held, name))))
        if held and not again and (isinstance(value, str | bool | None) or value < getattr(held, name)):
            model = replace(model, **{engine: held.model_copy(update={name: value})})
    return model


def _smaller(plan: Plan, path: str, least: int) -> Iterator[Plan]:
    """Yield one setting halved, and halved again."""
    engine, name = path.split(".")
    held = [getattr(spec, name) for model in plan.models.values() if (spec := getattr(model, engine))]
    value = max(held, default=0) // 2
    while value >= least:
        yield from _tried(plan, {path: value})
        value //= 2


def _recomputing(footprint: Footprint) -> Iterator[Plan]:
    """Yield activations computed again, and on GPUs on the host: a CPU's memory is the host's."""
    hosted = [INPUTS_ON_HOST] * (footprint.cluster.device == "cuda")
    return _tried(footprint.plan, RECOMPUTED, *hosted)


def _optimizer(footprint: Footprint) -> Iterator[Plan]:
    return _tried(footprint.plan, *[ON_HOST] * (footprint.cluster.device == "cuda"))


def _precision(footprint: Footprint) -> Iterator[Plan]:
    return _tried(footprint.plan, {"serve.dtype": "bfloat16"}, {"train.dtype": "bfloat16"}, BFLOAT16)


def _cache(footprint: Footprint) -> Iterator[Plan]:
    serves = [model.serve for model in footprint.plan.models.values() if model.serve]
    copies = max((serve.attention_replicas for serve in serves), default=1)
    return _smaller(footprint.plan, "serve.cache_tokens", math.ceil(footprint.work.most) * copies)


def _more_devices(plan: Plan, factor: int) -> Plan:
    """Return the plan with so many times the devices in every pool; a step on one device stays there."""
    pools = {pool: count * factor for pool, count in plan.pools.items()}

    def on(step: Step) -> Step:
        stays = step.layout == ONE and plan.pools[step.pool] > 1
        return step if stays else replace(step, devices=tuple(range(pools[step.pool])))

    steps, eval_steps = tuple(map(on, plan.steps)), tuple(map(on, plan.eval_steps))
    return replace(plan, pools=pools, steps=steps, eval_steps=eval_steps)


# those that cost the least first
LEVERS: tuple[Lever, ...] = (
    _precision,
    _groups,
    lambda it: _smaller(it.plan, "train.micro_tokens", LEAST_TOKENS),
    lambda it: _tried(it.plan, {"train.shard": None}),
    lambda it: _dividing(it, "expert_parallel"),
    _sharing,
    _recomputing,
    _cache,
    lambda it: _smaller(it.plan, "serve.max_rows", LEAST_ROWS),
    lambda it: _dividing(it, "tensor_parallel"),
    _optimizer,
)
