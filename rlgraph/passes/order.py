"""Orders the nodes so that each comes after those that it needs."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.ir.graph import Graph
from rlgraph.ir.regions import collects, members


def order(graph: Graph) -> Graph:
    """Return the nodes in running order: as written, each needed node just before its first user.

    Raises:
        GraphError: nodes that wait for each other, by columns or by versions.
    """
    graph = replace(graph, nodes=graph.in_order)
    for collect in collects(graph.nodes):
        # the nodes of a region stand right before the collect of their rows: they are repeated as one
        region, at = members(graph, collect), graph.nodes.index(collect)
        inside = {node.name for node in region}
        before = (node for node in graph.nodes[:at] if node.name not in inside)
        graph = replace(graph, nodes=(*before, *region, *graph.nodes[at:]))
    return graph
