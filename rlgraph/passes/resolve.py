"""Fill in attributes that follow from the rest of the graph.

``temperature``, where an op leaves it open (null), is that of the rollout that made its rows: log-probs are
of the distribution that was sampled from. Another value is refused.
"""

from __future__ import annotations

from dataclasses import replace

from rlgraph.errors import GraphError, Problem
from rlgraph.graph import Graph, Node
from rlgraph.passes.trace import draw, sampler


def resolve(graph: Graph) -> Graph:
    """Every ``temperature`` of a train engine's node as a number.

    Raises:
        GraphError: a node scores samples at another temperature than they were drawn at.
    """
    problems: list[Problem] = []
    nodes = tuple(_resolved(graph, node, problems) for node in graph.nodes)
    if problems:
        raise GraphError(problems)
    return replace(graph, nodes=nodes)


def _resolved(graph: Graph, node: Node, problems: list[Problem]) -> Node:
    if not (node.call and node.op.engine == "train" and "temperature" in node.call.attributes):
        return node
    rollout, given = sampler(graph, node.domain), node.call.attributes["temperature"]
    drawn = rollout.call.attributes.get("temperature") if rollout and rollout.call else None
    drawn = drawn or None  # 0 is greedy: there is no distribution to match
    if rollout and given is not None and drawn is not None and given != drawn:
        law = f"node `{node.name}` scores at temperature {given}; `{rollout.name}` sampled at {drawn}"
        remedy = f"leave out {node.name}.temperature: it is the rollout's then"
        drawing = draw(graph, [rollout.name, node.name])
        problems.append(Problem("temperature", law, node.mark, (), remedy, drawing))
    value = given if given is not None else drawn if drawn is not None else 1.0
    return replace(node, call=replace(node.call, attributes={**node.call.attributes, "temperature": value}))
