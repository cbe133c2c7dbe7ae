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
    plan = view.plan
    epochs = plan.schedule.epochs if isinstance(plan.schedule.epochs, dict) else {}
    for path, interval in intervals(plan).items():
        if isinstance(interval, int):
            if interval > plan.iterations > 0:
                yield from longer_than_the_run(plan, view.tree, path, f"{plan.iterations:,} iterations")
        elif interval.source in epochs and interval.epochs > epochs[interval.source]:
            length = f"{epochs[interval.source]:g} epochs of {interval.source}"
            yield from longer_than_the_run(plan, view.tree, path, length)


def longer_than_the_run(plan: Plan, tree: Tree, path: tuple[str, str], length: str) -> Iterator[Problem]:
    """Yield the warning of an interval that is longer than the run, which has such a length.

    None where a shipped graph has the interval, whose run another graph has made shorter.
    """
    place, name = tree.find(path), ".".join(path)
    if place is None or is_shipped(place.mark):
        return
    law = f"`{name}` is {intervals(plan)[path]}, and the run has {length}: {LONGER_THAN_RUN[path]}"
    yield warning("long-interval", law, place.mark, f"give less, or set: {{{name}: 0}}")


def best_of_one(view: RunView) -> Iterator[Problem]:
    """Yield a best checkpoint that is chosen among one, as no evaluation comes on the way."""
    plan = view.plan
    if plan.schedule.best and plan.eval_steps and not plan.eval_every:
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
    for name, call in _calls_with_courses(graph):
        for key, course in call.courses.items():
            attribute = (name, *key.split("."))
            place = view.tree.find(("nodes", *attribute))
            is_of_evaluation = view.tree.find(("eval", "nodes", *attribute)) is not None
            if place is None or is_of_evaluation or not isinstance(course, ValueSchedule):
                continue
            path = ".".join(attribute)
            metrics = " and ".join(f"`eval/{metric}`" for metric in plan.report)
            law = f"`{path}` changes in the course of the run ({course}), and evaluations use the value of "
            law += f"their iteration: {metrics} will change with the setting too, not with learning alone"
            _, final = course.points[-1]
            remedy = f"set: {{eval.nodes.{path}: {final}}}"
            yield warning("changing-evaluation", law, place.key or place.mark, remedy)


def _calls_with_courses(graph: Graph) -> Iterator[tuple[str, Call]]:
    """Yield the names of nodes whose attributes follow a course, and their calls.

    A source that gives all of its rows reads no weights, so that a course of these changes nothing.
    """
    for node in graph.nodes:
        if node.call and node.call.courses and node.call.value("rows") != "all":
            yield node.name, node.call


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
        for key, condition in calls[0].op.declared.when.items():
            is_attribute = key in calls[0].attributes and key != condition
            if not is_attribute or not node_tree.get(key):
                continue
            if _may_be_read(node_tree, calls, condition):
                continue
            reason = f"{calls[0].op.name} reads it only where `{condition}` is not 0"
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
    place, name = tree.at(path), ".".join(path)
    mark = place.key or place.mark
    remedy = f"remove: [{name}]" if is_shipped(mark) else f"leave out `{name}`"
    return warning("dead", f"`{name}` has no effect: {reason}", mark, remedy)
