"""Decides which settings may differ when a run is resumed, and which would contradict its checkpoint.

A checkpoint holds weights, optimizer averages, the position in each data source, rows that wait or are kept,
states of ops, and adaptive numbers. A setting that shaped one of them has to stay. Any other may change, and
applies from the next iteration on.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan
from rlgraph.printing.plan_diff import changed_values, value_text
from rlgraph.reports.former_plans import present_plan
from rlgraph.syntax.validate import NODE_KEYS

ALLOWED = (
    *("graph", "about", "eval", "eval.*", "pools", "pools.*", "schedule.*"),
    *("models.*.vocabulary", "models.*.optimizer.*", "models.*.serve", "models.*.serve.*"),
    *("models.*.train", "models.*.train.*", "nodes.*.*"),
)
REFUSED = (
    *("schedule.buffer", "schedule.buffer.staleness", "schedule.buffer.by"),
    *("models.*.optimizer.kind", "models.*.train.engine", "models.*.train.dtype"),
    *("models.*.train.lora", "models.*.train.lora.*", "*.adaptive"),
    *(f"nodes.*.{key}" for key in ({*NODE_KEYS} | {"every", "from"}) - {"pool"}),
    *(f"nodes.*.{key}.*" for key in ("in", "out", "refill")),
)


class ChangedSetting(NamedTuple):
    """A setting that differs from the saved one; its name is the path that an override would give."""

    name: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {value_text(self.saved)} -> {value_text(self.now)}"


def changes(path: Path, saved: Mapping[str, Any], plan: Plan) -> list[ChangedSetting]:
    """Return the settings that changed in a run at ``path`` whose ``plan.json`` holds ``saved``.

    Raises:
        RunError: one of them contradicts the run's checkpoint.
    """
    if saved["device"] != plan.device:
        law = f"{path} was planned for {saved['device']} devices, and this is for {plan.device}"
        remedy = "data types and engines that are `auto` differ: go on where it began, or start anew"
        raise RunError(f"{law}\n  {remedy} in another --run-dir")
    saved = present_plan(saved)
    changed: list[ChangedSetting] = []
    refused: list[str] = []
    nodes_with_state = _nodes_with_state(plan)
    saved_graph = _composed(saved)
    graph = _composed(plan.fields)
    for place, saved_value, value in changed_values(saved_graph, graph):
        change = ChangedSetting(".".join(place), saved_value, value)
        changed.append(change)
        if not _may_change(place, nodes_with_state):
            refused.append(f"  {change}")
    if refused:
        law = f"{path} can't go on with other settings than its checkpoint was made with:"
        remedy = "set them back; or begin a run with its weights: "
        remedy += f"rlgraph export {path} --to DIR, then models.NAME.path=DIR and another --run-dir"
        raise RunError("\n  ".join([law, *refused, remedy]))
    is_same_text = not changed and saved["origin"]["composed"] == plan.fields["origin"]["composed"]
    if is_same_text and saved["digest"] != plan.digest:
        law = f"{path} was made from another graph, or with other values of the environment"
        remedy = "compare its graph.yaml and plan.txt with yours, or start anew"
        raise RunError(f"{law}\n  {remedy} in another --run-dir")
    return changed


def _composed(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the graph that a plan was made from; an engine section that is absent becomes an empty one.

    Its buffer says by what it is filled, as the plan does: that may depend on the pools.
    """
    graph: dict[str, Any] = dict(plan["origin"]["composed"])
    buffer = plan["schedule"]["buffer"]
    if buffer:
        schedule = graph["schedule"]
        graph["schedule"] = {**schedule, "buffer": {**schedule["buffer"], "by": buffer["by"]}}
    models: dict[str, Any] = {}
    for name, model in (graph.get("models") or {}).items():
        models[name] = {**model, "serve": model.get("serve") or {}, "train": model.get("train") or {}}
    return {**graph, "models": models}


def _nodes_with_state(plan: Plan) -> frozenset[str]:
    """Return the nodes whose state is in a checkpoint, or whose attributes made rows that are in it."""
    functions = plan.functions["train"].items()
    nodes = set[str]()
    for node, function in functions:
        if function.holds or function.state == node:
            nodes.add(node)
    regions_with_rows = {name for name, region in plan.regions.items() if region.keep}
    regions_with_rows |= {step.region for step in plan.steps if step.unfinished}
    regions_with_rows.discard("")  # of steps in no region
    nodes |= {step.node for step in plan.steps if step.region in regions_with_rows}
    return frozenset(nodes)


def _may_change(place: tuple[str, ...], nodes_with_state: frozenset[str]) -> bool:
    if place[0] == "nodes" and place[1] in nodes_with_state:
        return False
    name = ".".join(place)
    if any(fnmatchcase(name, pattern) for pattern in REFUSED):
        return False
    return any(fnmatchcase(name, pattern) for pattern in ALLOWED)
