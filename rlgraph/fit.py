"""A plan that does not fit on its devices: where the memory goes, and the cheapest changes that would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlgraph.cluster import Cluster
from rlgraph.errors import GraphError, Problem
from rlgraph.memory import peaks
from rlgraph.plan import ModelPlan, Peak, Plan, Step
from rlgraph.prediction import memory_text
from rlgraph.sizes import Size
from rlgraph.units import size_text
from rlgraph.workload import Workload

MOST = 2**14  # devices that a remedy may ask for
LEAST_TOKENS, FEW_ROWS, LEAST_ROWS = 1024, 64, 8  # of a micro-batch and of a serve engine, in a remedy
NOTHING: Mapping[str, Any] = {}
BFLOAT16 = {"serve.dtype": "bfloat16", "train.dtype": "bfloat16"}
SMALLEST: dict[str, Any] = {**BFLOAT16, "serve.max_rows": FEW_ROWS, "train.micro_tokens": LEAST_TOKENS}


def refuse(
    plan: Plan, cluster: Cluster, work: Workload, sizes: Mapping[str, Size], peak: Mapping[str, Peak]
) -> GraphError:
    """The error: the table, and what would fit."""
    pool, worst = max(peak.items(), key=lambda item: item[1].bytes - item[1].capacity)
    law = (
        f"{plan.graph} does not fit on {cluster.cluster}: a device of pool {pool} needs "
        f"{size_text(worst.bytes)} in `{worst.step}` and has {size_text(worst.capacity)}"
    )
    found = remedies(plan, cluster, work, sizes)
    remedy = "what would make it fit:\n    " + "\n    or ".join(found) if found else "no setting makes it fit"
    return GraphError([Problem("does-not-fit", law, remedy=remedy, drawing="\n".join(memory_text(peak)))])


def fits(plan: Plan, cluster: Cluster, work: Workload, sizes: Mapping[str, Size]) -> bool:
    """Whether no pool's peak exceeds what a device has."""
    return all(peak.bytes <= peak.capacity for peak in peaks(plan, cluster, work, sizes).values())


def remedies(plan: Plan, cluster: Cluster, work: Workload, sizes: Mapping[str, Size]) -> list[str]:
    """The smallest change of each kind that makes the plan fit; where none does, several together."""
    kinds = (_dtypes(plan), _smaller(plan, "serve.max_rows", LEAST_ROWS))
    more = (_smaller(plan, "train.micro_tokens", LEAST_TOKENS), _devices(plan))
    found = [_first_fit(kind, cluster, work, sizes) for kind in (*kinds, *more)]
    if not any(found):
        found = [_first_fit(_together(plan), cluster, work, sizes)]
    return [words for words in found if words]


def _first_fit(
    tries: Iterator[tuple[str, Plan]], cluster: Cluster, work: Workload, sizes: Mapping[str, Size]
) -> str:
    return next((words for words, changed in tries if fits(changed, cluster, work, sizes)), "")


def _dtypes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    for settings in ({"serve.dtype": "bfloat16"}, {"train.dtype": "bfloat16"}, BFLOAT16):
        yield from _tried(plan, settings)


def _devices(plan: Plan, words: str = "") -> Iterator[tuple[str, Plan]]:
    devices = max(plan.pools.values()) * 2
    while devices <= MOST:
        yield f"{devices} devices{words}", more_devices(plan, devices)
        devices *= 2


def _together(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """bfloat16 and ever smaller micro-batches; with few rows in flight; and on more devices."""
    for settings in (BFLOAT16, {**BFLOAT16, "serve.max_rows": FEW_ROWS}):
        yield from _smaller(plan, "train.micro_tokens", LEAST_TOKENS, settings)
    for words, smallest in _tried(plan, {**SMALLEST}):
        yield from _devices(smallest, f" with {words}")


def _tried(plan: Plan, settings: Mapping[str, Any]) -> Iterator[tuple[str, Plan]]:
    """The plan with these settings in every model that they change."""
    words = []
    for name, model in plan.models.items():
        changed = [path for path, value in settings.items() if _set(model, {path: value}) != model]
        words += [f"models.{name}.{path}={settings[path]}" for path in changed]
    if words:
        models = {name: _set(model, settings) for name, model in plan.models.items()}
        yield " ".join(words), replace(plan, models=models)


def _set(model: ModelPlan, settings: Mapping[str, Any]) -> ModelPlan:
    for path, value in settings.items():
        engine, name = path.split(".")
        held = getattr(model, engine)
        if held and (isinstance(value, str) or value < held[name]):
            changed = {**held, name: value}
            model = replace(model, train=changed) if engine == "train" else replace(model, serve=changed)
    return model


def _smaller(
    plan: Plan, path: str, least: int, besides: Mapping[str, Any] = NOTHING
) -> Iterator[tuple[str, Plan]]:
    """One setting halved, and halved again; ``besides`` are settings that are made with each."""
    engine, name = path.split(".")
    held = [getattr(model, engine)[name] for model in plan.models.values() if getattr(model, engine)]
    value = max(held, default=0) // 2
    while value >= least:
        yield from _tried(plan, {**besides, path: value})
        value //= 2


def more_devices(plan: Plan, devices: int) -> Plan:
    """The plan with as many devices in every pool; a step on one device stays there."""

    def on(step: Step) -> Step:
        return (
            step
            if step.layout == "one" and plan.pools[step.pool] > 1
            else replace(step, devices=tuple(range(devices)))
        )

    return replace(
        plan,
        pools=dict.fromkeys(plan.pools, devices),
        steps=tuple(map(on, plan.steps)),
        eval_steps=tuple(map(on, plan.eval_steps)),
    )
