"""Orders the nodes so that each comes after those that it needs."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.regions import collects, members


def order(graph: Graph) -> Graph:
    """Return the nodes in running order: as written, each needed node just before its first user.

    Raises:
        GraphError: nodes that wait for each other, by columns or by versions.
    """
    graph = replace(graph, nodes=graph.in_order)
    for collect in collects(graph.nodes):
        graph = replace(graph, nodes=_with_region_together(graph, collect))
    return graph


def _with_region_together(graph: Graph, collect: Node) -> tuple[Node, ...]:
    """Return the nodes, those of a region, which are repeated as one, right before their collect."""
    region = members(graph, collect)
    inside = {node.name for node in region}
    position = graph.nodes.index(collect)
    outside = [node for node in graph.nodes[:position] if node.name not in inside]
    return (*outside, *region, *graph.nodes[position:])
