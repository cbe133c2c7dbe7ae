"""Inserts syncs, which bring a serve engine to the version with which a node generates."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.engines.registry import SERVING
from rlgraph.errors import raise_problems
from rlgraph.ir.actions import Kind
from rlgraph.ir.graph import Graph, Node
from rlgraph.laws.pools import delta_goes_between_pools


def sync(graph: Graph) -> Graph:
    """Insert one ``sync`` for each version of a model that serve engines read, before its first reader.

    An engine with weights of its own needs none.
    """
    syncs: dict[tuple[str, int], Node] = {}
    nodes = []
    for node in graph.nodes:
        serves = node.call and node.op.engine == "serve" and node.version is not None
        if serves and node.model and SERVING[graph.models[node.model].spec.serve.engine].paths:
            assert node.version is not None
            key = (node.model, node.version)  # a model's serve engine is on one pool
            syncs.setdefault(key, _sync(node, graph))
            node = replace(node, after=(*node.after, syncs[key].name))
        nodes.append(node)
    return replace(graph, nodes=(*nodes, *syncs.values())) if syncs else graph


def _sync(reader: Node, graph: Graph) -> Node:
    assert reader.model and reader.version is not None
    raise_problems(delta_goes_between_pools(graph, reader))
    updates = [n for n in graph.nodes if n.updates and n.model == reader.model]
    source = graph.engines[f"{reader.model}.train"]
    return Node(
        name=f"sync:{reader.model}" + (f"{reader.version:+d}" if reader.version > 0 else ""),
        kind=Kind.SYNC,
        model=reader.model,
        version=reader.version,
        after=tuple(n.name for n in updates[: max(reader.version, 0)]),
        pool=reader.pool,
        source=source if source != reader.pool else "",
        because=f"`{reader.name}` generates with it, and its serve engine may hold an older version",
    )
