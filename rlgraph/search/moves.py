"""Changes of settings that the searches try. All of them search this one space.

Settings are a mapping from a path in the graph to a value, as ``models.policy.train.micro_tokens`` -> 4096;
``pools`` -> name -> ``{"devices": count}`` resizes pools. They are printed as a user types them, and a plan
with them is that of the graph with them as its last overrides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlgraph.costs.optimizers import may_step_on_host
from rlgraph.engines.registry import EMBEDDED, OFFLOADS, SERVERS, own_base
from rlgraph.ir.function import Function
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan, Step, TrainPlan
from rlgraph.ir.steps import ONE
from rlgraph.planning.auto_settings import with_settings
from rlgraph.planning.device_groups import GROUPS, has_groups
from rlgraph.planning.model_limits import dividing

Settings = Mapping[str, Any]

FACTORS = (0.25, 0.5, 2, 4)  # by which sizes are scaled
STALENESS = (1, 2, 4)
# what a move does to results
AHEAD = "rows are one version old, and the ratio is to the weights that sampled them"
STREAM = "rows are of several versions, the oldest {staleness} updates old, and the loss corrects for it"
NARROW = "computes in bfloat16"


@dataclass(frozen=True)
class Move:
    """Settings to try; of the moves of one ``kind`` only the best is of interest."""

    kind: str
    settings: Settings
    alters: str = ""  # what it does to results, if anything


def with_pools(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the settings of pools with so many devices."""
    return {"pools": {name: {"devices": count} for name, count in sizes.items()}}


def surplus_stays(plan: Plan) -> dict[str, Any]:
    """Return the setting by which a buffer of surplus rows stays one where generation gets its own pool."""
    if not plan.schedule.surplus:
        return {}
    return {"schedule.buffer.by": "surplus"}


def group_sizes(per_host: int) -> list[int]:
    """Return how many devices of a host a server may span."""
    return [size for size in GROUPS if per_host % size == 0]


def division_sizes(plan: Plan, setting: str, per_host: int) -> list[int]:
    """Return how many devices of a host may divide layers or experts of some model, as ``setting`` says."""
    return [size for size in group_sizes(per_host)[1:] if dividing(plan, setting, size)]


def in_every_model(plan: Plan, values: Mapping[str, Any]) -> Settings:
    """Return the settings that give every model these values, where a model allows and does not have them.

    Args:
        plan: whose models.
        values: ``train.NAME`` or ``serve.NAME`` -> value; a number only replaces a larger one.
    """
    settings = {}
    for name, model in plan.models.items():
        for path, value in values.items():
            engine, field = path.split(".")
            section = getattr(model, engine)
            if section is None:
                continue
            current = getattr(section, field)
            if _may_change(model, field, current, value):
                settings[f"models.{name}.{path}"] = value
    return settings


def _may_change(model: ModelPlan, field: str, current: Any, value: Any) -> bool:
    if field == "optimizer_offload" and not may_step_on_host(model):
        return False
    if field in ("recompute", *OFFLOADS):
        runs_backward = not model.frozen
        return runs_backward and not current
    is_number = value is not None and not isinstance(value, str)
    if is_number:
        return bool(value < current)
    return bool(current != value)


def halvings(plan: Plan, path: str, least: int) -> Iterator[Settings]:
    """Yield a size of all engines halved, and halved again, until it is below ``least``."""
    engine, field = path.split(".")
    largest = 0
    for model in plan.models.values():
        section = getattr(model, engine)
        if section is not None:
            largest = max(largest, getattr(section, field))
    value = largest // 2
    while value >= least:
        yield in_every_model(plan, {path: value})
        value //= 2


def scaled_serving(name: str, model: ModelPlan, serve: ServePlan, on_gpus: bool) -> Iterator[Move]:
    """Yield changes of one engine that serves: its groups, its rows and cache, its precision."""
    path = f"models.{name}.serve"
    if has_groups(model):
        for size in GROUPS:
            yield Move("groups", {f"{path}.tensor_parallel": size})
    elif on_gpus and serve.engine == EMBEDDED:
        yield Move(SERVERS, {f"{path}.engine": SERVERS})
    for factor in FACTORS:
        rows = round(serve.max_rows * factor)
        yield Move("rows", {f"{path}.max_rows": rows})
        tokens = round(int(serve.cache_tokens) * factor)
        yield Move("cache", {f"{path}.cache_tokens": tokens})
    if on_gpus and serve.dtype == "float32":
        yield Move("serve dtype", {f"{path}.dtype": "bfloat16"}, NARROW)


def scaled_training(name: str, model: ModelPlan, train: TrainPlan, on_gpus: bool) -> Iterator[Move]:
    """Yield changes of one engine that trains: its micro-batches, recomputation, its precision."""
    path = f"models.{name}.train"
    for factor in FACTORS:
        tokens = round(train.micro_tokens * factor)
        yield Move(f"micro {name}", {f"{path}.micro_tokens": tokens})
    if model.optimizer:
        yield Move(f"recompute {name}", {f"{path}.recompute": not train.recompute})
    if on_gpus and train.dtype == "float32":
        yield Move(f"dtype {name}", {f"{path}.dtype": "bfloat16"}, NARROW)


def ahead(plan: Plan, pools: Settings) -> Move:
    """Return the move to generation that is one iteration ahead, on other pools or on those of the plan."""
    buffer = {"staleness": 1, "by": "batch"}
    return Move("ahead", {**pools, "schedule.buffer": buffer, **corrections(plan, 1)}, AHEAD)


def streaming(plan: Plan, pools: Settings) -> Iterator[Move]:
    """Yield moves to generation that streams, with corrections for rows of older weights."""
    for staleness in STALENESS:
        settings = dict(pools)
        settings["schedule.buffer"] = {"staleness": staleness}
        settings |= corrections(plan, staleness)
        yield Move("stream", settings, STREAM.format(staleness=staleness))


def corrections(plan: Plan, staleness: int) -> Settings:
    """Return edits that make up for rows of older weights: the ratio is to those that sampled.

    Where they are older than one update, clipping around them would hold learning up.
    """
    edits: dict[str, Any] = {}
    for step in plan.steps:
        if step.run is None or not step.run.trains:
            continue
        update = plan.functions["train"][step.node]
        path = f"nodes.{step.node}"
        column = update.ins.get("old_logprobs", "")
        if staleness > 1 and _clips(update):
            edits[f"{path}.loss.kind"] = "decoupled_ppo"
            edits[f"{path}.loss.cap"] = 2.0
            if column.startswith("rollout_logprobs"):
                edits[f"{path}.in.old_logprobs"] = "old_logprobs"
        elif column:
            edits[f"{path}.in.old_logprobs"] = "rollout_logprobs"
    return edits


def _clips(update: Function) -> bool:
    """Return whether an update's loss clips around the weights that sampled."""
    return any(hook.target.endswith(":ppo_clip") for hook in update.hooks.values())


def generates(plan: Plan) -> bool:
    """Return whether a model that trains generates, so that the two can be on different pools."""
    return any(model.serve and model.train for model in plan.models.values())


def applied(plan: Plan, settings: Settings) -> Plan:
    """Return a plan with settings of its models' engines and of its pools, without compiling its graph."""
    for path, value in settings.items():
        if path == "pools":
            sizes = {name: pool["devices"] for name, pool in value.items()}
            plan = _resized(plan, sizes)
            continue
        name, engine, field = path.removeprefix("models.").rsplit(".", 2)
        values = {field: value}
        becomes_embedded = (engine, field, value) == ("serve", "engine", EMBEDDED)
        if becomes_embedded and _trains_adapter(plan, name):
            values["lora"] = "adapter"  # as the compiler settles it
        plan = with_settings(plan, engine, {name: values})
    return plan


def _trains_adapter(plan: Plan, model: str) -> bool:
    train = plan.models[model].train
    return train is not None and train.lora is not None


def may_share_base(plan: Plan, model: str) -> bool:
    """Return whether a model would generate on the frozen weights below its adapter in the embedded engine,
    where it now has servers that hold these weights again."""
    train, serve = plan.models[model].train, plan.models[model].serve
    if train is None or serve is None:
        return False
    starts_servers = serve.engine == SERVERS and not serve.addresses
    if not train.lora or not starts_servers or train.pool != serve.pool:
        return False
    in_worker = serve.model_copy(update={"engine": EMBEDDED})
    return not own_base(in_worker, train, plan.meshes[model].shard)


def _resized(plan: Plan, pools: Mapping[str, int]) -> Plan:
    """Return the plan with so many devices in each pool; a step on one device stays there."""

    def resized(step: Step) -> Step:
        is_on_one = step.layout == ONE and plan.pools[step.pool] > 1
        if is_on_one:
            return step
        return replace(step, devices=tuple(range(pools[step.pool])))

    steps = tuple(map(resized, plan.steps))
    eval_steps = tuple(map(resized, plan.eval_steps))
    return replace(plan, pools=pools, steps=steps, eval_steps=eval_steps)


def in_graph_order(plan: Plan, settings: Settings) -> Settings:
    """Return settings of models in the order in which a plan lists models, engines and their fields."""
    ordered: dict[str, Any] = {}
    for name, model in plan.models.items():
        for engine, section in (("train", model.train), ("serve", model.serve)):
            if section is None:
                continue
            for field in type(section).model_fields:
                path = f"models.{name}.{engine}.{field}"
                if path in settings:
                    ordered[path] = settings[path]
    return {**ordered, **settings}
