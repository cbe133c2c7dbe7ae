"""Places every engine and node on a pool.

engines   where the graph says; else training and scoring on the first pool that is not given to serving,
          generation on the first pool that nothing of these is on (with one pool, there)
nodes     on a model: where its engine is. Others: where they say, else where most of what they read is;
          a source where it is read first
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import networkx as nx

from rlgraph.errors import fail
from rlgraph.ir.graph import Graph, Node
from rlgraph.passes.refill import collects, members


def place(graph: Graph) -> Graph:
    """Give every node a pool.

    Raises:
        GraphError: a pool that nothing runs on, or on which what streams would wait for itself.
    """
    pools: dict[str, str] = {}
    weights = {name: 100 if column.type.axis else 1 for name, column in graph.columns.items()}
    writer = {column: node.name for node in graph.nodes for column in node.writes}
    for node in graph.in_order:
        pools[node.name] = _fixed(graph, node, pools)
        if not pools[node.name]:
            near: Counter[str] = Counter()
            for column in node.reads:
                near[pools[writer[column]]] += weights[column]
            pools[node.name] = near.most_common(1)[0][0] if near else next(iter(graph.devices))
    _copied_in_place(graph)
    _all_used(graph, pools)
    _streams_apart(graph, pools)
    return replace(graph, nodes=tuple(replace(node, pool=pools[node.name]) for node in graph.nodes))


def _fixed(graph: Graph, node: Node, pools: dict[str, str]) -> str:
    """Return the pool that a node has to be on, if there is one."""
    if node.kind.facts.collects and graph.regions[node.after[0]].streams:
        trains = (other for other in graph.nodes if other.updates)  # what streams goes to where it is read
        return graph.engines[f"{next(trains).model}.train"]
    if node.kind.facts.at_filter:
        return pools[node.after[0]]  # the pool of its filter, which marks the rows that stay
    if node.call and node.op.engine:
        return graph.engines[f"{node.model}.{node.op.engine}"]
    if node.call and node.op.source and not node.pool:
        readers = [reader for column in node.writes for reader in graph.readers(column)]
        pools_near = (graph.engines[f"{r.model}.{r.op.engine}"] for r in readers if r.call and r.op.engine)
        return next(pools_near, "")
    return node.pool


def _copied_in_place(graph: Graph) -> None:
    """Check that weights are copied from one train engine onto another of the same pool."""
    for node in graph.nodes:
        pools = {name: graph.engines[f"{name}.train"] for name in (node.model, node.of) if name}
        if node.of and len({*pools.values()}) > 1:
            law = f"node `{node.name}` copies `{node.of}`, which trains on pool {pools[node.of]}, onto "
            law += f"`{node.model}`, which is on pool {pools[str(node.model)]}"
            remedy = f"put both on one: models.{node.model}.train.pool={pools[node.of]}"
            raise fail("copy-between-pools", law, node.mark, remedy=remedy)


def _all_used(graph: Graph, pools: dict[str, str]) -> None:
    idle = [pool for pool in graph.devices if pool not in pools.values()]
    if idle and not graph.report and graph.nodes:
        law = f"nothing runs on pool `{idle[0]}`"
        remedy = f"place an engine there, as models.NAME.train.pool={idle[0]}, or remove it"
        raise fail("idle-pool", law, None, remedy=remedy)


def _streams_apart(graph: Graph, pools: dict[str, str]) -> None:
    """Check that what waits for rows that stream is on no pool of what draws and measures them.

    A pool takes its steps in order: behind one that waits for the rows, they would never come.
    """
    for collect in collects(graph.nodes):
        if not graph.regions[collect.after[0]].streams:
            continue
        names = {collect.name, *nx.ancestors(graph.needs, collect.name)}
        behind, inside = [node for node in graph.in_order if node.name in names], members(graph, collect)
        leaving = (pools[node.name] for node in inside if node.leaves)
        drawn = next(leaving, pools[inside[0].name])
        waits = {pools[node.name] for node in behind}
        wrong = [(node, pools[collect.name]) for node in behind if pools[node.name] == drawn]
        wrong += [(node, drawn) for node in inside if pools[node.name] in waits - {drawn}]
        for node, other in wrong:
            law = f"`{node.name}` is on pool `{pools[node.name]}`, where "
            law += "it waits for rows that stream: they are drawn there, and would wait behind it"
            if node in inside:
                law = law.partition("where ")[0] + "where steps wait for the rows that it makes or measures "
                law += "as they stream"
            at = f"models.{node.model}.{node.op.engine}" if node.call and node.op.engine else node.name
            raise fail("stream-waits", law, node.mark, remedy=f"set: {{{at}.pool: {other}}}")
