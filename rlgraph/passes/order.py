"""Orders the nodes so that each comes after those that it needs."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.ir.graph import Graph, Node
from rlgraph.passes.refill import collects, members


def order(graph: Graph) -> Graph:
    """Return the nodes in running order: as written, each needed node just before its first user.

    Raises:
        GraphError: nodes that wait for each other, by columns or by versions.
    """
    graph = replace(graph, nodes=graph.in_order)
    for collect in collects(graph.nodes):
        graph = replace(graph, nodes=_together(graph, collect))
    return graph


def _together(graph: Graph, collect: Node) -> tuple[Node, ...]:
    """Return the nodes of a region right before the collect of their rows: they are repeated as one."""
    region = members(graph, collect)
    names = {node.name for node in region}
    at = graph.nodes.index(collect)
    return (*(n for n in graph.nodes[:at] if n.name not in names), *region, *graph.nodes[at:])
