"""Warnings about settings that come too late in a run, change what is measured, or have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from rlgraph.errors import Problem, warning
from rlgraph.ir.graph import Call, Graph
from rlgraph.ir.plan import Plan
from rlgraph.ir.schedules import ValueSchedule
from rlgraph.laws.views import RunView
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.shipped_files import is_shipped
from rlgraph.syntax.source import OPEN, Tree

SAVE, RECORD, EVALUATE = ("schedule", "save_every"), ("schedule", "record_every"), ("eval", "every")
# the path of an interval -> what comes of it where it is longer than the run
LONGER_THAN_RUN = {
    SAVE: "checkpoints come only at the end",
    RECORD: "only the first iteration is recorded",
    EVALUATE: "evaluations come only at its ends",
}


def intervals(plan: Plan) -> dict[tuple[str, str], int | Interval]:
    """Return a plan's intervals by their paths, without those that are 0."""
    by_path = {SAVE: plan.schedule.save_every, RECORD: plan.schedule.record_every, EVALUATE: plan.eval_every}
    return {path: interval for path, interval in by_path.items() if interval}


def long_intervals(view: RunView) -> Iterator[Problem]:
    """Yield intervals that are longer than the run, in iterations both, or in epochs of one source."""
    for path, interval in intervals(view.plan).items():
        length = _exceeded_length(view.plan, interval)
        if length:
            yield from longer_than_the_run(view.plan, view.tree, path, length)


def _exceeded_length(plan: Plan, interval: int | Interval) -> str:
    """Return the length of the run where the interval is longer, both in one unit; else ""."""
    if isinstance(interval, int):
        is_longer = interval > plan.iterations > 0
        return f"{plan.iterations:,} iterations" if is_longer else ""
    epochs = plan.schedule.epochs
    if not isinstance(epochs, dict) or interval.source not in epochs:
        return ""
    epochs_of_source = epochs[interval.source]
    if interval.epochs <= epochs_of_source:
        return ""
    return f"{epochs_of_source:g} epochs of {interval.source}"


def longer_than_the_run(plan: Plan, tree: Tree, path: tuple[str, str], length: str) -> Iterator[Problem]:
    """Yield the warning of an interval that is longer than the run, which has such a length.

    None where a shipped graph has the interval, whose run another graph has made shorter.
    """
    place = tree.find(path)
    if place is None or is_shipped(place.mark):
        return
    name = ".".join(path)
    law = f"`{name}` is {intervals(plan)[path]}, and the run has {length}: {LONGER_THAN_RUN[path]}"
    yield warning("long-interval", law, place.mark, f"give less, or set: {{{name}: 0}}")


def best_of_one(view: RunView) -> Iterator[Problem]:
    """Yield a best checkpoint that is chosen among one, as no evaluation comes on the way."""
    plan = view.plan
    evaluates_at_end_alone = plan.eval_steps and not plan.eval_every
    if plan.schedule.best and evaluates_at_end_alone:
        law = "`schedule.best` chooses among checkpoints by their evaluations, and there is only that after "
        law += "the last iteration (`eval.every` is 0)"
        mark = view.tree.at(("schedule", "best")).key
        yield warning("best-of-one", law, mark, "set: {eval.every: 20}, or another interval")


def changing_evaluations(view: RunView) -> Iterator[Problem]:
    """Yield attributes that follow a course and that evaluations read too.

    An evaluation uses the value of its iteration, so that what it reports changes with the setting. A course
    that is written in ``eval.nodes`` is intended.
    """
    plan, graph = view.plan, view.evaluation
    has_several = plan.eval_before or plan.eval_every
    if graph is None or not has_several:
        return
    metrics = " and ".join(f"`eval/{metric}`" for metric in plan.report)
    for attribute, course in _courses(graph):
        place = view.tree.find(("nodes", *attribute))
        is_of_evaluation = view.tree.find(("eval", "nodes", *attribute)) is not None
        if place is None or is_of_evaluation:
            continue
        path = ".".join(attribute)
        law = f"`{path}` changes in the course of the run ({course}), and evaluations use the value of "
        law += f"their iteration: {metrics} will change with the setting too, not with learning alone"
        _, final = course.points[-1]
        remedy = f"set: {{eval.nodes.{path}: {final}}}"
        yield warning("changing-evaluation", law, place.key or place.mark, remedy)


def _courses(graph: Graph) -> Iterator[tuple[tuple[str, ...], ValueSchedule]]:
    """Yield the attributes that follow a course, each as the path to it behind ``nodes``.

    A source that gives all of its rows reads no weights, so that a course of these changes nothing.
    """
    for node in graph.nodes:
        if not node.call or node.call.value("rows") == "all":
            continue
        for key, course in node.call.courses.items():
            if isinstance(course, ValueSchedule):
                yield (node.name, *key.split(".")), course


def unread_attributes(view: RunView) -> Iterator[Problem]:
    """Yield a problem for each attribute that its op reads only where another is not 0.

    Such a pair is declared (``Declaration.when``), and the other is 0 wherever the node runs.
    """
    evaluation = [view.evaluation] if view.evaluation else []
    yield from _unread_in_section(view.tree, ("nodes",), [view.train, *evaluation])
    yield from _unread_in_section(view.tree, ("eval", "nodes"), evaluation)


def _unread_in_section(tree: Tree, section: tuple[str, ...], graphs: list[Graph]) -> Iterator[Problem]:
    nodes = tree.find(section)
    if nodes is None:
        return
    calls_of = _calls_by_node(graphs)
    for name, node_tree in nodes.items.items():
        calls = calls_of.get(name)
        if not calls:
            continue
        op = calls[0].op
        for key, condition in op.declared.when.items():
            is_attribute = key in calls[0].attributes and key != condition
            if not is_attribute or not node_tree.get(key):
                continue
            if not _may_be_read(node_tree, calls, condition):
                reason = f"{op.name} reads it only where `{condition}` is not 0"
                yield decides_nothing(tree, (*section, name, key), reason)


def _calls_by_node(graphs: list[Graph]) -> dict[str, list[Call]]:
    """Return the calls of the nodes of a name, in each of the graphs that has one."""
    calls_of: dict[str, list[Call]] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.call:
                calls_of.setdefault(node.name, []).append(node.call)
    return calls_of


def _may_be_read(node_tree: Tree, calls: list[Call], condition: str) -> bool:
    """Return whether the attribute is, or may be, other than 0 by which another one is read."""
    value = node_tree.get(condition)
    if value and value.value == OPEN:
        return True
    return any(call.attributes[condition] or condition in call.courses for call in calls)


def decides_nothing(tree: Tree, path: tuple[str, ...], reason: str) -> Problem:
    """Return the warning of a setting, or a whole section, without which the plan is the same."""
    place = tree.at(path)
    mark = place.key or place.mark
    name = ".".join(path)
    remedy = f"remove: [{name}]" if is_shipped(mark) else f"leave out `{name}`"
    return warning("dead", f"`{name}` has no effect: {reason}", mark, remedy)
