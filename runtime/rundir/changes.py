"""Which settings a run may have changed when it goes on, and which its checkpoint would contradict.

A checkpoint holds weights, averages of optimizers, rows given by data sources, rows that wait or are held,
states of ops and adaptive numbers. A setting that one of them was made by stays; any other may change, and
holds from the next iteration on.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan
from rlgraph.printing.plan_diff import changed_values, value_text
from rlgraph.syntax.validate import NODE_KEYS

ALLOWED = (
    *("graph", "about", "eval", "eval.*", "pools", "pools.*", "schedule.*"),
    *("models.*.vocabulary", "models.*.optimizer.*", "models.*.serve", "models.*.serve.*"),
    *("models.*.train", "models.*.train.*", "nodes.*.*"),
)
REFUSED = (
    *("schedule.staleness", "schedule.stream", "schedule.stream.staleness"),
    *("models.*.optimizer.kind", "models.*.train.engine", "models.*.train.dtype"),
    *("models.*.train.lora", "models.*.train.lora.*", "*.adaptive"),
    *(f"nodes.*.{key}" for key in ({*NODE_KEYS} | {"every", "from"}) - {"pool"}),
    *(f"nodes.*.{key}.*" for key in ("in", "out", "refill")),
)


class ChangedSetting(NamedTuple):
    """A setting that is another than it was, by the name that edits give it."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {value_text(self.before)} -> {value_text(self.now)}"


def changes(path: Path, saved: Mapping[str, Any], plan: Plan) -> list[ChangedSetting]:
    """Return what is changed in a run at ``path`` whose ``plan.json`` holds ``saved``.

    Raises:
        RunError: something is that its checkpoint can't go on with.
    """
    if saved["device"] != plan.device:
        law = f"{path} was planned for {saved['device']} devices, and this is for {plan.device}"
        remedy = "data types and engines that are `auto` differ: go on where it began, or start anew"
        raise RunError(f"{law}\n  {remedy} in another --run-dir")
    before, now = (_composed(origin) for origin in (saved["origin"], plan.fields["origin"]))
    every = {place: ChangedSetting(".".join(place), a, b) for place, a, b in changed_values(before, now)}
    keeping = _keeping(plan)
    if refused := [f"  {change}" for place, change in every.items() if not _may_change(place, keeping)]:
        law = f"{path} can't go on with other settings than its checkpoint was made with:"
        back = "set them back; or begin a run with its weights"
        begin = f"rlgraph export {path} --to DIR, then models.NAME.path=DIR and another --run-dir"
        raise RunError("\n  ".join([law, *refused, f"{back}: {begin}"]))
    if not every and saved["digest"] != plan.digest:
        law = f"{path} was made from another graph, or with other values of the environment"
        remedy = "compare its graph.yaml and plan.txt with yours, or start anew"
        raise RunError(f"{law}\n  {remedy} in another --run-dir")
    return [*every.values()]


def _composed(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the graph that a plan was made from, with the engines of every model, given or not."""
    graph: dict[str, Any] = dict(origin["composed"])
    models = (graph.get("models") or {}).items()
    engines = {name: {key: model.get(key) or {} for key in ("serve", "train")} for name, model in models}
    return {**graph, "models": {name: {**model, **engines[name]} for name, model in models}}


def _keeping(plan: Plan) -> frozenset[str]:
    """Return the nodes of which a checkpoint has a state, or rows that their attributes made."""
    functions = plan.functions["train"].items()
    own = {node for node, function in functions if function.holds or function.state == node}
    waiting = {name for name, region in plan.regions.items() if region.keep}
    waiting |= {step.region for step in plan.steps if step.leaves}
    return frozenset(own | {step.node for step in plan.steps if step.region and step.region in waiting})


def _may_change(place: tuple[str, ...], keeping: frozenset[str]) -> bool:
    name = ".".join(place)
    if place[0] == "nodes" and place[1] in keeping:
        return False
    allowed, refused = (any(fnmatchcase(name, like) for like in every) for every in (ALLOWED, REFUSED))
    return allowed and not refused
