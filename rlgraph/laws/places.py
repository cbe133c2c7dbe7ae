"""Places in a graph's files where a warning is shown: where the user wrote the setting that it is about."""

from __future__ import annotations

from collections.abc import Iterable

from rlgraph.errors import Mark
from rlgraph.ir.graph import Graph, Node
from rlgraph.syntax.shipped_files import is_shipped
from rlgraph.syntax.source import Tree


def setting_place(tree: Tree, graph: Graph, node: Node, key: str) -> Mark | None:
    """Return where a key of a node is written, for an evaluation or for both; else where the node is."""
    sections: list[tuple[str, ...]] = [("nodes",)]
    if graph.report:
        sections = [("eval", "nodes"), ("nodes",)]
    for section in sections:
        place = tree.find((*section, node.name, key))
        if place:
            return place.key
    return node.mark


def place_of_user(marks: Iterable[Mark | None], default: Mark | None) -> Mark | None:
    """Return the first place that is not in a shipped graph, else the default."""
    for mark in marks:
        if mark and not is_shipped(mark):
            return mark
    return default


def section_of_nodes(graph: Graph) -> str:
    """Return what stands in front of a node's name in an edit: ``eval.nodes.`` of an evaluation."""
    return "eval.nodes." if graph.report else ""
