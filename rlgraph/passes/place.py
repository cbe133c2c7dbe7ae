"""Places every engine and node on a pool.

engines   where the graph says; else training and scoring on the first pool that is not given to serving,
          generation on the first pool that nothing of these is on (with one pool, there)
nodes     on a model: where its engine is. Others: where they say, else where most of what they read is;
          a source where it is read first
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rlgraph.errors import raise_problems
from rlgraph.ir.graph import Graph, Node
from rlgraph.laws.pools import PLACE_LAWS
from rlgraph.laws.views import PlacedView


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
    view = PlacedView(graph, pools)
    raise_problems(problem for law in PLACE_LAWS for problem in law(view))
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
