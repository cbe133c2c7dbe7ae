"""All that a page shows of a plan, and of a run, as what JSON holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rlgraph.costs.memory import PARTS
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.frontend.graph_diff import diff_text
from rlgraph.ir.intervals import words
from rlgraph.ir.plan import Function, Plan, Step, plain
from rlgraph.printing.column_text import weight
from rlgraph.printing.plan_diff import differences
from rlgraph.printing.plan_text import prediction_text, sentence, step_text
from rlgraph.syntax.source import Tree, flow, place
from rlgraph.version import VERSION
from rlgraph.view.docs import docs, hook_name
from rlgraph.view.drawings.links import links, title, weights
from rlgraph.view.given import Subject
from rlgraph.view.recorded import recorded
from rlgraph.view.timeline import arrows, depth, expected, footprint, lanes, memory

Contents = dict[str, Any]
LASTING = ("reserve", "weights", "optimizer", "serve weights")  # drawn below what comes and goes


def contents(new: Subject, old: Subject | None = None) -> Contents:
    """Return what a page holds.

    Args:
        new: whose graph, plan and run are shown.
        old: what its graph and plan are held against.
    """
    plan, graph = new.plan, _composed(new.plan)
    return {
        "rlgraph": VERSION,
        "graph": plan.graph,
        "about": plan.about,
        "pools": dict(plan.pools),
        "models": plan.fields["models"],
        "phases": {phase: _phase(plan, phase, steps, graph) for phase, steps in plan.phases.items()},
        "docs": docs(new),
        "notes": [*plan.notes],
        "open": [*plan.open_values],
        "predicted": [*prediction_text(plan)],
        "iterations": plan.iterations,
        "timeline": _timeline(plan),
        "memory": _memory(plan),
        "engines": _engines(plan),
        "diff": _diff(new.plan, old.plan) if old else None,
        "run": recorded(new.run_dir) if new.run_dir else None,
    }


def _phase(plan: Plan, phase: str, steps: tuple[Step, ...], graph: Tree | None) -> Contents:
    return {
        "steps": [_step(plan, step, graph) for step in steps],
        "links": [asdict(link) for link in links(plan, phase)],
        "weights": [{**asdict(found), "name": found.name} for found in weights(steps)],
        "columns": {
            name: {
                **asdict(column),
                "parent": plan.domain(phase, name).parent,
                "times": plan.domain(phase, name).times,
                "weight": weight(column.type),
            }
            for name, column in plan.columns[phase].items()
        },
    }


def _step(plan: Plan, step: Step, graph: Tree | None) -> Contents:
    function = plan.functions[step.phase].get(step.node)
    nodes = graph.get("nodes") if graph else None
    written = nodes.get(step.node) if nodes else None
    return {
        **asdict(step),
        "work": step.work,
        "engines": step.engines,
        "moves": step.facts.moves,
        "title": title(step),
        "does": sentence(step),
        "often": words(step.when) if step.when else "",
        "takes": step_text(plan, step),
        "attributes": [*_attributes(function, written)] if function else [],
        "ins": dict(function.ins) if function else {},
        "losses": [hook_name(hook) for hook in function.hooks.values()] if function else [],
        "place": place(written) if written else "",
    }


def _attributes(function: Function, written: Tree | None) -> Iterator[tuple[str, str, str]]:
    """Name, value, and where it was written; nothing for a default."""
    items = written.items if written else {}
    for name, value in function.attributes.items():
        tree = items.get(name)
        course = function.courses.get(name)
        yield name, str(course or flow(plain(value))), place(tree) if tree else ""
    for name, hook in function.hooks.items():  # such as a loss, with attributes of its own
        tree = items.get(name)
        told = {key: str(course) for key, course in hook.courses.items()}
        kind = {"kind": hook_name(hook), **hook.attributes, **told}
        yield name, flow(plain(kind)), place(tree) if tree else ""


def _composed(plan: Plan) -> Tree | None:
    """The graph of a plan with the place of each value; None where it is not there now, or has changed."""
    if plan.origin is None:
        return None
    try:
        tree = compose(plan.origin.graph, plan.origin.overrides)
    except GraphError:  # a saved plan may be looked at where its graph is not
        return None
    return tree if tree.plain() == plan.origin.composed else None


def _timeline(plan: Plan) -> Contents:
    events, period = expected(plan)
    count = 1 + max((event.iteration for event in events), default=0)
    return {
        "lanes": [{**vars(lane), "steps": sorted(lane.steps)} for lane in lanes(plan)],
        "events": [[e.step.id, e.iteration, _short(e.start), _short(e.end)] for e in events],
        "arrows": [[*arrow.source, *arrow.target, arrow.name] for arrow in arrows(plan, count)],
        "period": period,
        "count": count,
        "guessed": plan.predicted is None,
        "depth": depth(plan),
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.7g}")


def _memory(plan: Plan) -> Contents | None:
    found = footprint(plan)
    if found is None:
        return None
    pools = {pool: memory(found, pool) for pool in plan.pools}
    held = {part for steps in pools.values() for parts in steps.values() for part in parts}
    parts = sorted(held, key=lambda part: (part not in LASTING, PARTS.index(part)))
    return {
        "capacity": found.cluster.memory,
        "cluster": found.cluster.cluster,
        "parts": parts,
        "pools": pools,
    }


def _engines(plan: Plan) -> Contents:
    """Engine, as ``policy.train`` -> its pool, the parts that may leave the device, and those that are away
    between two iterations."""
    found: Contents = {}
    for name, model in plan.models.items():
        if model.train:
            parts = ("parameters",) if model.frozen else ("parameters", "optimizer")
            found[f"{name}.train"] = {"pool": model.train.pool, "parts": parts}
        if model.serve:
            found[f"{name}.serve"] = {"pool": model.serve.pool, "parts": ("weights",)}
    return {name: {**engine, "away": [*plan.away.get(name, ())]} for name, engine in found.items()}


def _diff(new: Plan, old: Plan) -> Contents:
    """The edits that make the new graph of the old one, and what the plans do otherwise."""
    edits: list[str] = []
    if new.origin and old.origin:
        edits = diff_text(Tree.of(old.origin.composed), Tree.of(new.origin.composed)).splitlines()
    return {
        "old": old.graph,
        "edits": [[part.strip() for part in edit.partition(" ")[::2]] for edit in edits],
        "plan": differences(old, new),
        "before": {
            "steps": [_step(old, step, None) for step in old.steps],
            "links": [asdict(link) for link in links(old, "train")],
        },
        "status": _status(new, old),
    }


def _status(new: Plan, old: Plan) -> dict[str, str]:
    """Node -> added, removed or changed; nothing for those that are as they were."""
    now, before = ({step.node: step for step in plan.steps} for plan in (new, old))
    found = {name: "added" for name in now if name not in before}
    found |= {name: "removed" for name in before if name not in now}
    for name in now.keys() & before.keys():
        if _said(new, now[name]) != _said(old, before[name]):
            found[name] = "changed"
    return dict(sorted(found.items()))


def _said(plan: Plan, step: Step) -> tuple[Any, ...]:
    """Return what makes a step the same: not its number, nor what is predicted."""
    function = plan.functions["train"].get(step.node)
    return step.kind, step.op, step.pool, step.reads, step.writes, dict(step.models), step.lead, function
