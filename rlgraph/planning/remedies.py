"""A plan that does not fit on its devices: where the memory goes, and the cheapest changes that would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
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
from rlgraph.units import size_text

MOST = 2**14  # devices that a remedy may ask for
LEAST_TOKENS, FEW_ROWS, LEAST_ROWS = 1024, 64, 8  # remedies suggest no less
NOTHING: Mapping[str, Any] = {}
BFLOAT16 = {"serve.dtype": "bfloat16", "train.dtype": "bfloat16"}
RECOMPUTED = {"train.recompute": True}
ON_HOST = {"train.optimizer_offload": True}
INPUTS_ON_HOST: Mapping[str, Any] = {**RECOMPUTED, "train.activation_offload": True}


def refuse(footprint: Footprint, before: Plan) -> GraphError:
    """Return the error: the table of a plan with every move of engines that helps, and what would fit.

    ``before`` is the plan without these moves.
    """
    peak, plan, cluster = footprint.peaks(), footprint.plan, footprint.cluster
    pool, worst = max(peak.items(), key=lambda item: item[1].lacks)
    law = f"{plan.graph} does not fit on {cluster.cluster}: a device of pool {pool} needs "
    law += f"{size_text(worst.bytes)} in `{worst.step}` and has {size_text(worst.capacity)}"
    law += f", of which {size_text(worst.free)} stay free" * bool(worst.free)
    changes = "\n    or ".join(remedies(replace(footprint, plan=before)))
    remedy = f"what would make it fit:\n    {changes}" if changes else "no setting makes it fit"
    return GraphError([Problem("does-not-fit", law, remedy=remedy, drawing="\n".join(memory_text(peak)))])


def remedies(footprint: Footprint) -> list[str]:
    """Return the smallest change of each kind that makes the plan fit; where none does, several together."""
    plan = footprint.plan
    hosted = [INPUTS_ON_HOST] if footprint.cluster.device == "cuda" else []  # a CPU's memory is the host's
    kinds = (
        _tried(plan, {"serve.dtype": "bfloat16"}, {"train.dtype": "bfloat16"}, BFLOAT16),
        _tried(plan, RECOMPUTED, *hosted),
        _tried(plan, *(ON_HOST for _ in hosted)),
        _tried(plan, {"train.shard": None}),
        _smaller(plan, "serve.max_rows", LEAST_ROWS),
        _smaller(plan, "serve.cache_tokens", math.ceil(footprint.work.most)),
        _groups(footprint),
        _smaller(plan, "train.micro_tokens", LEAST_TOKENS),
        _sharing(footprint),
        _dividing(footprint, "expert_parallel"),
        _dividing(footprint, "tensor_parallel"),
    )
    changes = [_first_fit(kind, footprint) for kind in kinds]
    if not any(changes):
        both = _tried(plan, *({**ON_HOST, **inputs} for inputs in hosted))
        several = (chain(both, _grouped(footprint)), _shared(footprint))
        changes = [_first_fit(kind, footprint) for kind in several]
    changes.append(_first_fit(_devices(plan), footprint))
    if not any(changes):
        changes = [_first_fit(_together(plan), footprint)]
    return [words for words in changes if words]


def _first_fit(tries: Iterator[tuple[str, Plan]], footprint: Footprint) -> str:
    """Return the first change with which the plan fits, with engines off their devices where that helps."""
    for words, changed in tries:
        laid = replace(footprint, plan=changed, sizes=sizes_of(changed))
        if fits(replace(laid, plan=reside(laid))):
            return words
    return ""


def _groups(footprint: Footprint) -> Iterator[tuple[str, Plan]]:
    """Yield servers that span more devices of a host."""
    plan, host = footprint.plan, footprint.cluster.devices
    serves = {name: model.serve for name, model in plan.models.items() if model.serve and has_groups(model)}
    for size in (size for size in GROUPS if host % size == 0):
        fewer = {name: serve for name, serve in serves.items() if serve.tensor_parallel < size}
        if names := [name for name, serve in fewer.items() if plan.pools[serve.pool] % size == 0]:
            words = " ".join(f"models.{name}.serve.tensor_parallel={size}" for name in names)
            yield words, with_settings(plan, "serve", {name: {"tensor_parallel": size} for name in names})


def _grouped(footprint: Footprint) -> Iterator[tuple[str, Plan]]:
    """Yield such servers with smaller micro-batches."""
    for words, plan in _groups(footprint):
        for more, changed in _smaller(plan, "train.micro_tokens", LEAST_TOKENS * 4):
            yield f"{words} {more}", changed


def _sharing(footprint: Footprint) -> Iterator[tuple[str, Plan]]:
    """Yield the rows of every model that trains shared by more devices, of a host and then of several."""
    plan = footprint.plan
    trains = {name: train for name in sharing(plan) if (train := plan.models[name].train)}
    for ranks in sharing_sizes(plan, footprint.cluster.devices):
        fewer = {name: train.pool for name, train in trains.items() if train.sequence_parallel < ranks}
        if names := [name for name, pool in fewer.items() if plan.pools[pool] % ranks == 0]:
            words = " ".join(f"models.{name}.train.sequence_parallel={ranks}" for name in names)
            yield words, with_settings(plan, "train", {name: {"sequence_parallel": ranks} for name in names})


def _dividing(footprint: Footprint, setting: str) -> Iterator[tuple[str, Plan]]:
    """Yield experts of mixtures, or layers of other models, divided among more devices of a host."""
    plan = footprint.plan

    def may(name: str, ranks: int) -> bool:
        train = plan.models[name].train
        devices = train and (train.shard or plan.pools[train.pool])
        return bool(devices and devices % ranks == 0 and getattr(train, setting) < ranks)

    for ranks in (size for size in GROUPS[1:] if footprint.cluster.devices % size == 0):
        if names := [name for name in dividing(plan, setting, ranks) if may(name, ranks)]:
            words = " ".join(f"models.{name}.train.{setting}={ranks}" for name in names)
            yield words, with_settings(plan, "train", {name: {setting: ranks} for name in names})


def _shared(footprint: Footprint) -> Iterator[tuple[str, Plan]]:
    """Yield such rows with servers that span more devices."""
    for words, plan in _groups(footprint):
        for more, changed in _sharing(replace(footprint, plan=plan)):
            yield f"{words} {more}", changed


def _devices(plan: Plan, words: str = "") -> Iterator[tuple[str, Plan]]:
    total, factor = sum(plan.pools.values()), 2
    while total * factor <= MOST:
        yield f"{total * factor} devices{words}", _more_devices(plan, factor)
        factor *= 2


def _together(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield bfloat16 and ever smaller micro-batches; computing again; few rows in flight; more devices."""
    again = {**BFLOAT16, **RECOMPUTED}
    few = {**again, "serve.max_rows": FEW_ROWS}
    for settings in (BFLOAT16, again, few):
        yield from _smaller(plan, "train.micro_tokens", LEAST_TOKENS, settings)
    for words, smallest in _tried(plan, {**few, "train.micro_tokens": LEAST_TOKENS}):
        yield from _devices(smallest, f" with {words}")


def _tried(plan: Plan, *several: Mapping[str, Any]) -> Iterator[tuple[str, Plan]]:
    """Yield the plan with some settings, and with others, in every model that they change."""
    for settings in several:
        words = []
        for name, model in plan.models.items():
            changed = [path for path, value in settings.items() if _set(model, {path: value}) != model]
            words += [f"models.{name}.{path}={flow(settings[path])}" for path in changed]
        if words:
            models = {name: _set(model, settings) for name, model in plan.models.items()}
            yield " ".join(words), replace(plan, models=models)


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


def _smaller(
    plan: Plan, path: str, least: int, besides: Mapping[str, Any] = NOTHING
) -> Iterator[tuple[str, Plan]]:
    """Yield one setting halved, and halved again; ``besides`` are settings that are made with each."""
    engine, name = path.split(".")
    held = [getattr(spec, name) for model in plan.models.values() if (spec := getattr(model, engine))]
    value = max(held, default=0) // 2
    while value >= least:
        yield from _tried(plan, {**besides, path: value})
        value //= 2


def _more_devices(plan: Plan, factor: int) -> Plan:
    """Return the plan with so many times the devices in every pool; a step on one device stays there."""
    pools = {pool: count * factor for pool, count in plan.pools.items()}

    def on(step: Step) -> Step:
        stays = step.layout == ONE and plan.pools[step.pool] > 1
        return step if stays else replace(step, devices=tuple(range(pools[step.pool])))

    steps, eval_steps = tuple(map(on, plan.steps)), tuple(map(on, plan.eval_steps))
    return replace(plan, pools=pools, steps=steps, eval_steps=eval_steps)
