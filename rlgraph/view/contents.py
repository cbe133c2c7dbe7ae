"""Everything that a page shows of a plan and of its run, as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, assert_never

from rlgraph.costs.memory import PARTS
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.frontend.graph_diff import diff_text
from rlgraph.frontend.graph_of_run import graph_of_run
from rlgraph.ir.actions import MoveEngine, OnColumns, RunOp, Sync
from rlgraph.ir.function import Function
from rlgraph.ir.intervals import words
from rlgraph.ir.plan import Plan, Step, plain
from rlgraph.nodes import HOOKS, OPS
from rlgraph.ops.registry import load
from rlgraph.printing.column_text import weight
from rlgraph.printing.document import PlanDocument
from rlgraph.printing.plan_diff import differences
from rlgraph.printing.step_text import StepEntry
from rlgraph.reference.describe import entry_of
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import flow, place
from rlgraph.version import VERSION
from rlgraph.view.curves import curves_of_runs, grouped_by_seed
from rlgraph.view.drawings.boxes import links, weights
from rlgraph.view.recorded import outcome_of, recorded
from rlgraph.view.stream import predicted_stream, seven_digits
from rlgraph.view.subject import Subject
from rlgraph.view.timeline import ahead, arrows, expected, footprint, lanes, memory

Contents = dict[str, Any]
HOOK_OF: dict[str, str] = {target: name for known in HOOKS.values() for name, target in known.items()}
# parts of a device's memory that stay: they are drawn below the parts that come and go
LASTING = (
    "reserve",
    "weights",
    "optimizer",
    "serve weights",
    "adapters",
    "server",
)


def contents(new: Subject, *compared: Subject) -> Contents:
    """Return what a page shows of a subject, and how it differs from others if there are any.

    Edits are those from the first of the ``compared`` whose graph differs by more than the seed. Curves are
    those of all runs.
    """
    plan = new.plan
    document = PlanDocument(plan)
    graph = _composed_graph(plan, new.run_dir)
    return {
        "rlgraph": VERSION,
        "graph": plan.graph,
        "about": plan.about,
        "pools": dict(plan.pools),
        "models": plan.fields["models"],
        "phases": {phase: _phase(document, phase, graph) for phase in plan.phases},
        "docs": _docs(new),
        "notes": [*plan.notes],
        "open": [*plan.open_values],
        "headline": [document.predicted_on, document.headline] if document.headline else None,
        "predicted": [*document.prediction],
        "iterations": plan.iterations,
        "timeline": _timeline(plan),
        "memory": _memory(plan),
        "stream": predicted_stream(plan),
        "engines": _engines(plan),
        "diff": _comparison(document, new, compared) if compared else None,
        "run": recorded(new.run_dir) if new.run_dir else None,
    }


def _phase(document: PlanDocument, phase: str, graph: Tree | None) -> Contents:
    plan = document.plan
    return {
        "steps": [_step(entry, graph) for entry in document.steps[phase]],
        "links": [asdict(link) for link in links(plan, phase)],
        "weights": [{**asdict(version), "name": version.name} for version in weights(plan.phases[phase])],
        "columns": {name: _column(plan, phase, name) for name in plan.columns[phase]},
    }


def _column(plan: Plan, phase: str, name: str) -> Contents:
    column = plan.columns[phase][name]
    domain = plan.domain(phase, name)
    return {
        **asdict(column),
        "parent": domain.parent,
        "times": domain.times,
        "weight": weight(column),
    }


def _step(entry: StepEntry, graph: Tree | None) -> Contents:
    plan, step = entry.plan, entry.step
    function = plan.functions[step.phase].get(step.node)
    nodes = graph.get("nodes") if graph else None
    node_tree = nodes.get(step.node) if nodes else None
    return {
        **asdict(step.as_file_row()),
        "work": _work(step),
        "engines": step.engines,
        "moves": step.action.direction if isinstance(step.action, MoveEngine) else "",
        "title": entry.title,
        "does": entry.sentence,
        "often": words(step.when) if step.when else "",
        "takes": entry.cost,
        "attributes": [*_attributes(function, node_tree, _sampled_attribute(plan, step))] if function else [],
        "ins": dict(function.ins) if function else {},
        "losses": [_hook_name(hook) for hook in function.hooks.values()] if function else [],
        "place": place(node_tree) if node_tree else "",
    }


def _work(step: Step) -> str:
    """Return what a step works on, as the page colours it."""
    match step.action:
        case RunOp():
            if step.action.trains:
                return "update"
            return {"serve": "generate", "train": "score", "": "other"}[step.action.engine]
        case Sync() | MoveEngine():
            return "weights"
        case OnColumns():
            return "columns"
        case _:
            assert_never(step.action)


def _sampled_attribute(plan: Plan, step: Step) -> str | None:
    """Return the attribute of a scoring step that follows the rollout's: see rlgraph/passes/defaults.py."""
    function = plan.functions[step.phase].get(step.node)
    if function is None or step.run is None or step.run.engine != "train":
        return None
    if not any(candidate.generates for candidate in plan.phases[step.phase]):
        return None
    return function.roles.get("temperature")


def _attributes(
    function: Function, node_tree: Tree | None, sampled: str | None
) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and origin of each attribute: a place, "as sampled", or "" for a default."""
    values = {name: flow(plain(value)) for name, value in function.attributes.items()}
    for name, schedule in function.courses.items():
        values[name] = str(schedule)
    for name, hook in function.hooks.items():  # such as a loss, which has attributes of its own
        schedules = {key: str(schedule) for key, schedule in hook.courses.items()}
        values[name] = flow(plain({"kind": _hook_name(hook), **hook.attributes, **schedules}))
    for name, value in values.items():
        value_tree = node_tree.get(name) if node_tree else None
        if value_tree:
            yield name, value, place(value_tree)
        else:
            yield name, value, "as sampled" if name == sampled else ""


def _composed_graph(plan: Plan, run_dir: Path | None) -> Tree | None:
    """Return the graph of a plan with the place of each value; None if its file is gone or has changed.

    The graph of a run is that which its folder keeps if its file is gone or has changed.
    """
    if plan.origin is None:
        return None
    # a saved plan may be looked at on a machine that does not have its graph
    with suppress(GraphError):
        graph, overrides = plan.origin.graph, plan.origin.overrides
        if run_dir:
            graph, overrides = graph_of_run(run_dir, graph, overrides)
        tree = compose(graph, overrides)
        if tree.written().plain() == plan.origin.composed:
            return tree
    return None


def _timeline(plan: Plan) -> Contents:
    events, period = expected(plan)
    count = 1 + max((event.iteration for event in events), default=0)
    return {
        "lanes": [{**vars(lane), "steps": sorted(lane.steps)} for lane in lanes(plan)],
        "events": [
            [event.step.id, event.iteration, seven_digits(event.start), seven_digits(event.end)]
            for event in events
        ],
        "arrows": [[*arrow.source, *arrow.target, arrow.name] for arrow in arrows(plan, count)],
        "period": period,
        "count": count,
        "guessed": plan.predicted is None,
        "depth": ahead(plan),
    }


def _memory(plan: Plan) -> Contents | None:
    pricing = footprint(plan)
    if pricing is None:
        return None
    pools = {pool: memory(pricing, pool) for pool in plan.pools}
    present = {part for moments in pools.values() for sizes in moments.values() for part in sizes}
    cluster = pricing.cluster
    return {
        "capacity": cluster.memory,
        "cluster": cluster.cluster,
        "parts": sorted(present, key=lambda part: (part not in LASTING, PARTS.index(part))),
        "pools": pools,
    }


def _engines(plan: Plan) -> Contents:
    """Return engine, as ``policy.train`` -> its pool, and the parts that can leave the device.

    ``away`` are the parts that are off the device between two iterations.
    """
    engines: Contents = {}
    for name, model in plan.models.items():
        if model.train:
            # an optimizer on the host is never on the device, so no step moves it
            is_on_host = plan.device == "cuda" and model.train.optimizer_offload
            has_movable_optimizer = not model.frozen and not is_on_host
            movable = ("parameters", "optimizer") if has_movable_optimizer else ("parameters",)
            engines[f"{name}.train"] = {"pool": model.train.pool, "parts": movable}
        for pool in plan.pools:
            if plan.serves(name, pool):
                engines[plan.engine_key(name, "serve", pool)] = {"pool": pool, "parts": ("weights",)}
    for name, engine in engines.items():
        engine["away"] = [*plan.away.get(name, ())]
    return engines


def _comparison(document: PlanDocument, new: Subject, compared: Sequence[Subject]) -> Contents:
    """Return how a subject differs from another, and the curves of all runs among them and ``compared``."""
    alike, *different = grouped_by_seed([new, *compared])
    old = different[0][0] if different else alike[1]
    runs = [subject for subject in (new, *compared) if subject.run_dir]
    return {
        "new": _name(new),
        "old": _name(old),
        "outcome": outcome_of(old.run_dir) if old.run_dir else {},
        "curves": curves_of_runs(runs) if len(runs) > 1 else [],
        **_diff(document, PlanDocument(old.plan)),
    }


def _name(subject: Subject) -> str:
    """Return the name of a graph, or the folder of a run with it."""
    if subject.run_dir is None:
        return subject.plan.graph
    return f"{subject.run_dir} ({subject.plan.graph})"


def _diff(new: PlanDocument, old: PlanDocument) -> Contents:
    """Return the edits that turn the old graph into the new one, and how the plans differ."""
    edits: list[str] = []
    if new.plan.origin and old.plan.origin:
        old_tree, new_tree = Tree.of(old.plan.origin.composed), Tree.of(new.plan.origin.composed)
        edits = diff_text(old_tree, new_tree).splitlines()
    return {
        "edits": [_verb_and_object(edit) for edit in edits],
        "plan": differences(old.plan, new.plan),
        "before": {
            "steps": [_step(entry, None) for entry in old.steps["train"]],
            "links": [asdict(link) for link in links(old.plan, "train")],
        },
        "status": _status(new.plan, old.plan),
    }


def _verb_and_object(edit: str) -> list[str]:
    verb, _, object_of_verb = edit.partition(" ")
    return [verb.strip(), object_of_verb.strip()]


def _status(new: Plan, old: Plan) -> dict[str, str]:
    """Return node -> added, removed or changed; nothing for nodes that are the same in both plans."""
    new_steps = {step.node: _identity(new, step) for step in new.steps}
    old_steps = {step.node: _identity(old, step) for step in old.steps}
    status = {}
    for name in sorted({*new_steps, *old_steps}):
        if name not in old_steps:
            status[name] = "added"
        elif name not in new_steps:
            status[name] = "removed"
        elif new_steps[name] != old_steps[name]:
            status[name] = "changed"
    return status


def _identity(plan: Plan, step: Step) -> tuple[Any, ...]:
    """Return what makes a step the same as another: not its number, nor what is predicted."""
    function = plan.functions["train"].get(step.node)
    return step.kind, step.op, step.pool, step.reads, step.writes, dict(step.models), step.lead, function


def _docs(subject: Subject) -> dict[str, dict[str, Any]]:
    """Return op or loss -> its docs; a user's own is left out if its file was not loaded for the plan."""
    docs: dict[str, dict[str, Any]] = {}
    for phase, functions in subject.plan.functions.items():
        ops = {step.node: step.op for step in subject.plan.phases[phase]}
        for node, function in functions.items():
            op = ops[node]
            is_shipped = op in OPS
            if op not in docs and is_shipped:
                docs[op] = _shipped_doc(op)
            elif op not in docs and subject.compiled:
                docs[op] = _user_doc(op, function)
            for path, hook in function.hooks.items():
                name = _hook_name(hook)
                if name in docs:
                    continue
                if hook.target in HOOK_OF:
                    docs[name] = _shipped_doc(name)
                elif subject.compiled:
                    docs[name] = _user_doc(name, hook, load(function.target).hook(path))
    return docs


def _hook_name(hook: Function) -> str:
    """Return a hook's name in graphs: a shipped loss or tool by its name, another by file and function."""
    return HOOK_OF.get(hook.target, hook.target)


def _shipped_doc(name: str) -> dict[str, Any]:
    entry = entry_of(name)
    return {**asdict(entry.doc), "facts": [*entry.facts]}


def _user_doc(name: str, function: Function, kind: Any = None) -> dict[str, Any]:
    doc = load(function.target, name, kind).docstring()
    return {**asdict(doc), "facts": [("source", ", ".join(doc.sources))]}
