"""Weights as versions: who reads ``policy@v``, who writes ``policy@v+1``, and the order that follows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from rlgraph.graph import Graph, Node


def version(graph: Graph) -> Graph:
    """Give each node the version of its model that it reads, and the nodes that must come before it.

    Readers of ``policy@v`` come before the first update; updates follow one another as written; readers of
    ``policy@next`` come after the last.
    """
    updates: dict[str, list[Node]] = defaultdict(list)
    readers: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.model:
            (updates if node.updates else readers)[node.model].append(node)
    changed: dict[str, Node] = {}
    for model, nodes in readers.items():
        for node in nodes:
            last = tuple(n.name for n in updates[model][-1:]) if node.reads_next else ()
            at = len(updates[model]) if node.reads_next else 0
            changed[node.name] = replace(node, version=at, after=node.after + last)
    for model, nodes in updates.items():
        before = tuple(n.name for n in readers[model] if not n.reads_next)
        for count, node in enumerate(nodes):
            changed[node.name] = replace(node, version=count, after=node.after + before)
            before = (node.name,)
    return replace(graph, nodes=tuple(changed.get(node.name, node) for node in graph.nodes))
