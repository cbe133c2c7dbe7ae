"""Regions of a graph: the steps that are repeated in rounds, from a data source to a filter that collects."""

from __future__ import annotations

from collections.abc import Sequence

from rlgraph.ir.actions import Kind
from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.trace import older

FINISHED = "finished"  # the rows that have finished, of a rollout that streams


def collects(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that end a region."""
    return [node for node in nodes if node.kind is Kind.COLLECT]


def members(graph: Graph, collect: Node) -> list[Node]:
    """Return the nodes of a region in order: its filter, and all that its ``collect`` is computed from."""
    copies = {node.name for node in graph.nodes if node.inserted}  # a selection needs its filter
    needed = graph.needs.successors(collect.name)
    inside = reached(graph.needs, needed, waits=lambda node, _: node in copies)
    return [node for node in graph.nodes if node.name in inside]


def aged(graph: Graph) -> Graph:
    """Return the graph as its oldest rows see it: of a region that keeps a surplus, nodes read older weights.

    A row that waits for an iteration was sampled, and whatever was measured of it in the region, by the
    weights of the iteration before.
    """
    older_nodes: dict[str, Node] = {}
    for collect in collects(graph.nodes):
        iterations = graph.regions[collect.after[0]].keep
        for node in members(graph, collect):
            older_nodes[node.name] = older(graph, node, iterations)
    return graph.with_nodes(older_nodes)
