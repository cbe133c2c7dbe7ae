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
        if not _takes_weights(graph, node):
            nodes.append(node)
            continue
        assert node.model is not None and node.version is not None
        key = (node.model, node.version)  # a model's serve engine is on one pool
        if key not in syncs:
            syncs[key] = _sync(graph, node, node.model, node.version)
        nodes.append(replace(node, after=(*node.after, syncs[key].name)))
    if not syncs:
        return graph
    return replace(graph, nodes=(*nodes, *syncs.values()))


def _takes_weights(graph: Graph, node: Node) -> bool:
    """Return whether a node generates with weights that its serve engine gets from a train engine."""
    if not node.call or node.op.engine != "serve":
        return False
    if node.model is None or node.version is None:
        return False
    engine = graph.models[node.model].spec.serve.engine
    return bool(SERVING[engine].paths)


def _sync(graph: Graph, reader: Node, model: str, version: int) -> Node:
    raise_problems(delta_goes_between_pools(graph, reader))
    updates = [update.name for update in graph.updates(model)]
    updates_before = max(version, 0)  # an older version is there on entry to the iteration
    suffix = f"{version:+d}" if version > 0 else ""
    source = graph.engines[f"{model}.train"]
    return Node(
        name=f"sync:{model}{suffix}",
        kind=Kind.SYNC,
        model=model,
        version=version,
        after=tuple(updates[:updates_before]),
        pool=reader.pool,
        source=source if source != reader.pool else "",
        because=f"`{reader.name}` generates with it, and its serve engine may hold an older version",
    )
