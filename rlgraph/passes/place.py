"""Put every node on a pool. With one pool there is one choice."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.graph import Graph


def place(graph: Graph) -> Graph:
    """Every node on the graph's pool."""
    (pool,) = graph.devices
    return replace(graph, nodes=tuple(replace(node, pool=pool) for node in graph.nodes))
