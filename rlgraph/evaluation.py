"""The ``eval`` section: the graph once more, with other attributes, pruned to what is reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlgraph.bind import bind
from rlgraph.errors import GraphError, Problem, fail, nearest
from rlgraph.graph import Graph
from rlgraph.ports import written
from rlgraph.source import OPEN, Tree


def bind_evaluation(tree: Tree, devices: int) -> Graph | None:
    """The graph of the ``eval`` section, or None: the nodes with their changes, and what to report.

    Updates are left out, and so is a node whose columns are written by one that ``eval`` adds.

    Raises:
        GraphError: with every problem found; a change of what is not there; a report of no column.
    """
    section = tree.get("eval")
    if section is None:
        return None
    nodes = tree.items["nodes"]
    changes = section.items.get("nodes", Tree({}, section.mark)).items
    for name, change in changes.items():
        if nodes.get(name) is None and change.get("op") is None:
            law = f"`eval` changes node `{name}`, which the graph does not have"
            remedy = nearest(name, nodes.items) or "a node that only `eval` has needs an `op`"
            raise fail("edit-missing", law, change.key, nodes.items, remedy)
        nodes = nodes.with_item(name, _changed(nodes.get(name), change))
    graph = bind(tree.with_item("nodes", nodes).with_item("eval", None), devices)
    added = {name for name, change in changes.items() if change.get("op")}
    taken = {column for node in graph.nodes if node.name in added for column in written(node).values()}
    kept = [n for n in graph.nodes if n.name in changes or not (n.updates or taken & {*written(n).values()})]
    report = section.items["report"].items
    _reported_exist(report, {column for node in kept for column in written(node).values()})
    metrics = {name: str(column.value) for name, column in report.items()}
    return replace(graph, nodes=tuple(kept), report=metrics) if metrics else None


def evaluation_every(tree: Tree) -> int:
    """Iterations between evaluations; 0 for none on the way."""
    item = tree.get("eval")
    every = item.get("every") if item else None
    return int(every.value) if every and every.value != OPEN else 0


def _changed(node: Tree | None, change: Tree) -> Tree:
    if node is None or change.get("op"):
        return change
    return replace(node, value={**node.items, **change.items})


def _reported_exist(report: Mapping[str, Tree], columns: set[str]) -> None:
    problems = [
        Problem(
            "missing-column",
            f"`eval.report` names column `{column.value}`, which nothing writes",
            column.mark,
            tuple(sorted(columns)),
            nearest(str(column.value), columns),
        )
        for column in report.values()
        if column.value not in (OPEN, *columns)
    ]
    if problems:
        raise GraphError(problems)
