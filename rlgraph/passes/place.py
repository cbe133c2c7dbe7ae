"""Places every engine and node on a pool.

engines   where the graph says; else training and scoring on the first pool that is not given to serving,
          generation on the first pool that nothing of these is on (with one pool, there)
nodes     on a model: where its engine is. Others: where they say, else where most of what they read is;
          a source where it is read first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from rlgraph.ir.actions import Kind
from rlgraph.ir.graph import Graph, Node
from rlgraph.laws.pools import PLACE_LAWS
from rlgraph.laws.views import PlacedView
from rlgraph.passes.check_laws import raise_broken
from rlgraph.passes.partition import move_weight


def place(graph: Graph) -> Graph:
    """Give every node a pool.

    Raises:
        GraphError: a pool that nothing runs on, or on which what streams would wait for itself.
    """
    pools: dict[str, str] = {}
    for node in graph.in_order:
        pools[node.name] = _required_pool(graph, node, pools) or _nearest_pool(graph, node, pools)
    raise_broken(PLACE_LAWS, PlacedView(graph, pools))
    nodes = [replace(node, pool=pools[node.name]) for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def _nearest_pool(graph: Graph, node: Node, pools: Mapping[str, str]) -> str:
    """Return the pool where most of what a node reads is; the first pool for one that reads nothing."""
    if not node.reads:
        return next(iter(graph.devices))
    weights: Counter[str] = Counter()
    for column in node.reads:
        pool = pools[graph.writers[column].name]
        weights[pool] += move_weight(graph.columns[column])
    ((heaviest, _),) = weights.most_common(1)
    return heaviest


def _required_pool(graph: Graph, node: Node, pools: Mapping[str, str]) -> str:
    """Return the pool that a node has to be on; "" where it may be on any."""
    if node.kind is Kind.COLLECT and graph.regions[node.after[0]].streams:
        return _pool_of_update(graph)  # rows that stream go to where they are read
    if node.kind in (Kind.SELECT, Kind.COLLECT):
        return pools[node.after[0]]  # the pool of its filter, which marks the rows that stay
    if node.call is None:
        return node.pool
    if node.op.engine:
        return _pool_of_engine(graph, node)
    if node.op.source and not node.pool:
        return _pool_of_reader(graph, node)
    return node.pool


def _pool_of_engine(graph: Graph, node: Node) -> str:
    return graph.engines[f"{node.model}.{node.op.engine}"]


def _pool_of_update(graph: Graph) -> str:
    update = next(node for node in graph.nodes if node.updates)
    return graph.engines[f"{update.model}.train"]


def _pool_of_reader(graph: Graph, source: Node) -> str:
    """Return the pool of the first node on a model that reads a source; "" where there is none."""
    readers: list[Node] = []
    for column in source.writes:
        readers += graph.readers(column)
    for reader in readers:
        if reader.call and reader.op.engine:
            return _pool_of_engine(graph, reader)
    return ""
