"""Evaluation: the graph once more, with the changes of ``eval``, pruned to the reported columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlgraph.errors import GraphError, fail, nearest
from rlgraph.frontend.bind import bind
from rlgraph.frontend.ports import written
from rlgraph.frontend.tree_paths import changed
from rlgraph.ir.graph import Graph
from rlgraph.syntax.source import OPEN, Tree
from rlgraph.syntax.validate import Binder


def bind_evaluation(tree: Tree, devices: int, device: str = "cpu") -> Graph | None:
    """Return the graph of the ``eval`` section, or None: the nodes with their changes, and the report.

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
        nodes = nodes.with_item(name, changed(nodes.get(name), change))
    graph = bind(tree.with_item("nodes", nodes).with_item("eval", None), devices, device)
    added = {name for name, change in changes.items() if change.get("op")}
    taken = {column for node in graph.nodes if node.name in added for column in written(node).values()}
    kept = [n for n in graph.nodes if n.name in changes or not (n.updates or taken & {*written(n).values()})]
    report = section.items["report"].items
    _reported_exist(report, {column for node in kept for column in written(node).values()})
    metrics = {name: str(column.value) for name, column in report.items()}
    return replace(graph, nodes=tuple(kept), report=metrics) if metrics else None


def evaluation_every(tree: Tree) -> int:
    """Return the iterations between evaluations; 0 for none on the way."""
    item = tree.get("eval")
    every = item.get("every") if item else None
    return int(every.value) if every and every.value != OPEN else 0


def _reported_exist(report: Mapping[str, Tree], columns: set[str]) -> None:
    binder = Binder()
    for column in report.values():
        if column.value not in (OPEN, *columns):
            law = f"`eval.report` names column `{column.value}`, which nothing writes"
            remedy = nearest(str(column.value), columns)
            binder.problem("missing-column", law, column.mark, sorted(columns), remedy)
    if binder.problems:
        raise GraphError(binder.problems)
