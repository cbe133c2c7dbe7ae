"""Bring a serve engine to the version of its model that a node generates with."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.graph import Graph, Node


def sync(graph: Graph) -> Graph:
    """One ``sync`` for each version of a model that serve engines read, before its first reader."""
    syncs: dict[tuple[str, int], Node] = {}
    nodes = []
    for node in graph.nodes:
        if node.call and node.op.engine == "serve" and node.model and node.version is not None:
            key = (node.model, node.version)  # its serve engine is on one pool
            syncs.setdefault(key, _sync(node, graph))
            node = replace(node, after=(*node.after, syncs[key].name))
        nodes.append(node)
    return replace(graph, nodes=(*nodes, *syncs.values())) if syncs else graph


def _sync(reader: Node, graph: Graph) -> Node:
    assert reader.model and reader.version is not None
    updates = [n for n in graph.nodes if n.updates and n.model == reader.model]
    source = graph.engines[f"{reader.model}.train"]
    return Node(
        name=f"sync:{reader.model}" + (f"{reader.version:+d}" if reader.version > 0 else ""),
        kind="sync",
        model=reader.model,
        version=reader.version,
        after=tuple(n.name for n in updates[: max(reader.version, 0)]),
        pool=reader.pool,
        source=source if source != reader.pool else "",
        because=f"`{reader.name}` generates with it, and its serve engine may hold an older version",
    )
