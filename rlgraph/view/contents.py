"""All that a page shows of a plan, and of a run, as what JSON holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from rlgraph.costs.memory import PARTS
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.frontend.graph_diff import diff_text
from rlgraph.ir.function import Function
from rlgraph.ir.intervals import words
from rlgraph.ir.plan import Plan, Step, plain
from rlgraph.nodes import HOOKS, OPS
from rlgraph.ops.docstring import read_docstring
from rlgraph.ops.registry import load
from rlgraph.printing.column_text import weight
from rlgraph.printing.headline import headline, predicted_on
from rlgraph.printing.plan_diff import differences
from rlgraph.printing.plan_text import prediction_text, sentence, step_text
from rlgraph.reference.describe import entry_of
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import flow, place
from rlgraph.version import VERSION
from rlgraph.view.drawings.boxes import links, title, weights
from rlgraph.view.recorded import recorded
from rlgraph.view.stream import predicted_stream
from rlgraph.view.subject import Subject
from rlgraph.view.timeline import ahead, arrows, expected, footprint, lanes, memory

Contents = dict[str, Any]
HOOK_OF: dict[str, str] = {target: name for known in HOOKS.values() for name, target in known.items()}
LASTING = (
    "reserve",
    "weights",
    "optimizer",
    "serve weights",
    "adapters",
    "server",
)  # drawn below what comes and goes


def contents(new: Subject, old: Subject | None = None) -> Contents:
    """Return what a page holds of a subject, beside what is different from an old one."""
    plan, graph = new.plan, _composed(new.plan)
    return {
        "rlgraph": VERSION,
        "graph": plan.graph,
        "about": plan.about,
        "pools": dict(plan.pools),
        "models": plan.fields["models"],
        "phases": {phase: _phase(plan, phase, steps, graph) for phase, steps in plan.phases.items()},
        "docs": _docs(new),
        "notes": [*plan.notes],
        "open": [*plan.open_values],
        "headline": [predicted_on(plan), headline(plan)] if headline(plan) else None,
        "predicted": [*prediction_text(plan)],
        "iterations": plan.iterations,
        "timeline": _timeline(plan),
        "memory": _memory(plan),
        "stream": predicted_stream(plan),
        "engines": _engines(plan),
        "diff": _diff(new.plan, old.plan) if old else None,
        "run": recorded(new.run_dir) if new.run_dir else None,
    }


def _phase(plan: Plan, phase: str, steps: tuple[Step, ...], graph: Tree | None) -> Contents:
    return {
        "steps": [_step(plan, step, graph) for step in steps],
        "links": [asdict(link) for link in links(plan, phase)],
        "weights": [{**asdict(version), "name": version.name} for version in weights(steps)],
        "columns": {name: _column(plan, phase, name) for name in plan.columns[phase]},
    }


def _column(plan: Plan, phase: str, name: str) -> Contents:
    column, domain = plan.columns[phase][name], plan.domain(phase, name)
    about = {"parent": domain.parent, "times": domain.times, "weight": weight(column)}
    return {**asdict(column), **about}


def _step(plan: Plan, step: Step, graph: Tree | None) -> Contents:
    function = plan.functions[step.phase].get(step.node)
    nodes = graph.get("nodes") if graph else None
    written = nodes.get(step.node) if nodes else None
    samples = step.engine == "train" and any(one.generates for one in plan.phases[step.phase])
    sampled = function.roles.get("temperature") if function and samples else None  # passes/defaults.py
    return {
        **asdict(step),
        "work": step.work,
        "engines": step.engines,
        "moves": step.facts.moves,
        "title": title(step),
        "does": sentence(step),
        "often": words(step.when) if step.when else "",
        "takes": step_text(plan, step),
        "attributes": [*_attributes(function, written, sampled)] if function else [],
        "ins": dict(function.ins) if function else {},
        "losses": [_hook_name(hook) for hook in function.hooks.values()] if function else [],
        "place": place(written) if written else "",
    }


def _attributes(
    function: Function, written: Tree | None, sampled: str | None
) -> Iterator[tuple[str, str, str]]:
    """Yield name, value, and where it was written or that it is as sampled; nothing for a default."""
    values = {name: flow(plain(value)) for name, value in function.attributes.items()}
    values |= {name: str(course) for name, course in function.courses.items()}
    for name, hook in function.hooks.items():  # such as a loss, with attributes of its own
        told = {key: str(course) for key, course in hook.courses.items()}
        values[name] = flow(plain({"kind": _hook_name(hook), **hook.attributes, **told}))
    for name, value in values.items():
        tree = written.get(name) if written else None
        yield name, value, place(tree) if tree else "as sampled" if name == sampled else ""


def _composed(plan: Plan) -> Tree | None:
    """Return the graph of a plan with the place of each value; None where it is not there or has changed."""
    with suppress(GraphError):  # a saved plan may be looked at where its graph is not
        if plan.origin:
            tree = compose(plan.origin.graph, plan.origin.overrides)
            return tree if tree.written().plain() == plan.origin.composed else None
    return None


def _timeline(plan: Plan) -> Contents:
    events, period = expected(plan)
    count = 1 + max((event.iteration for event in events), default=0)
    return {
        "lanes": [{**vars(lane), "steps": sorted(lane.steps)} for lane in lanes(plan)],
        "events": [
            [e.step.id, e.iteration, *(float(f"{seconds:.7g}") for seconds in (e.start, e.end))]
            for e in events
        ],
        "arrows": [[*arrow.source, *arrow.target, arrow.name] for arrow in arrows(plan, count)],
        "period": period,
        "count": count,
        "guessed": plan.predicted is None,
        "depth": ahead(plan),
    }


def _memory(plan: Plan) -> Contents | None:
    held = footprint(plan)
    if held is None:
        return None
    pools = {pool: memory(held, pool) for pool in plan.pools}
    present = {part for steps in pools.values() for parts in steps.values() for part in parts}
    parts = sorted(present, key=lambda part: (part not in LASTING, PARTS.index(part)))
    cluster = held.cluster
    return {"capacity": cluster.memory, "cluster": cluster.cluster, "parts": parts, "pools": pools}


def _engines(plan: Plan) -> Contents:
    """Return engine, as ``policy.train`` -> its pool, the parts that may leave the device, and those that are
    away between two iterations."""
    engines: Contents = {}
    for name, model in plan.models.items():
        if model.train:
            on_host = plan.device == "cuda" and model.train.optimizer_offload
            parts = ("parameters",) if model.frozen or on_host else ("parameters", "optimizer")
            engines[f"{name}.train"] = {"pool": model.train.pool, "parts": parts}
        for pool in (pool for pool in plan.pools if plan.serves(name, pool)):
            engines[plan.held(name, "serve", pool)] = {"pool": pool, "parts": ("weights",)}
    return {name: {**engine, "away": [*plan.away.get(name, ())]} for name, engine in engines.items()}


def _diff(new: Plan, old: Plan) -> Contents:
    """Return the edits that make the new graph of the old one, and what the plans do otherwise."""
    edits: list[str] = []
    if new.origin and old.origin:
        edits = diff_text(Tree.of(old.origin.composed), Tree.of(new.origin.composed)).splitlines()
    steps = [_step(old, step, None) for step in old.steps]
    return {
        "old": old.graph,
        "edits": [[part.strip() for part in edit.partition(" ")[::2]] for edit in edits],
        "plan": differences(old, new),
        "before": {"steps": steps, "links": [asdict(link) for link in links(old, "train")]},
        "status": _status(new, old),
    }


def _status(new: Plan, old: Plan) -> dict[str, str]:
    """Return node -> added, removed or changed; nothing for those that are as they were."""
    now, before = ({step.node: _said(plan, step) for step in plan.steps} for plan in (new, old))
    return {
        name: "added" if name not in before else "changed" if name in now else "removed"
        for name in sorted({*now, *before})
        if now.get(name) != before.get(name)
    }


def _said(plan: Plan, step: Step) -> tuple[Any, ...]:
    """Return what makes a step the same: not its number, nor what is predicted."""
    function = plan.functions["train"].get(step.node)
    return step.kind, step.op, step.pool, step.reads, step.writes, dict(step.models), step.lead, function


def _docs(new: Subject) -> dict[str, dict[str, Any]]:
    """Return op or loss -> its docs; of a user's only where its file was loaded to compile the graph."""
    told: dict[str, dict[str, Any]] = {}
    for phase, functions in new.plan.functions.items():
        names = {step.node: step.op for step in new.plan.phases[phase]}
        for node, function in functions.items():
            name = names[node]
            if name not in told and (name in OPS or new.compiled):
                told[name] = _doc(name, name in OPS, function)
            for path, hook in function.hooks.items():
                shipped, name = hook.target in HOOK_OF, _hook_name(hook)
                if name not in told and (shipped or new.compiled):
                    kind = None if shipped else load(function.target).hook(path)
                    told[name] = _doc(name, shipped, hook, kind)
    return told


def _hook_name(hook: Function) -> str:
    """Return a hook's name in graphs: a shipped loss or tool by its name, another by file and function."""
    return HOOK_OF.get(hook.target, hook.target)


def _doc(name: str, shipped: bool, function: Function, kind: Any = None) -> dict[str, Any]:
    if shipped:
        entry = entry_of(name)
        return {**asdict(entry.doc), "facts": [*entry.facts]}
    doc = read_docstring(load(function.target, name, kind).doc)
    return {**asdict(doc), "facts": [("source", ", ".join(doc.sources))]}
