"""Fills in attributes that follow from the rest of the graph.

``temperature``, where an op leaves it open (null), is that of the rollout that made its rows: log-probs are
of the distribution that was sampled from. Another value is refused.
"""

from __future__ import annotations

from dataclasses import replace

from rlgraph.errors import raise_problems
from rlgraph.ir.graph import Call, Graph, Node
from rlgraph.ir.schedules import ValueSchedule
from rlgraph.ir.trace import sampler
from rlgraph.laws.rows import TEMPERATURE_LAWS, scores_at_temperature, temperature
from rlgraph.laws.views import NodeView


def resolve(graph: Graph) -> Graph:
    """Resolve every ``temperature`` of a train engine's node to a number.

    Raises:
        GraphError: a node scores samples at another temperature than they were drawn at.
    """
    views = [NodeView(graph, node) for node in graph.nodes]
    raise_problems(problem for view in views for law in TEMPERATURE_LAWS for problem in law(view))
    return replace(graph, nodes=tuple(_resolved(graph, node) for node in graph.nodes))


def _resolved(graph: Graph, node: Node) -> Node:
    if not scores_at_temperature(node):
        return node
    rollout = sampler(graph, node.domain)
    drawn = temperature(rollout) if rollout else None
    return replace(node, call=_at(node.called, temperature(node) or drawn or 1.0))


def _at(call: Call, value: float | ValueSchedule) -> Call:
    name = call.name_of("temperature")
    if not isinstance(value, ValueSchedule):
        return replace(call, attributes={**call.attributes, name: value})
    attributes = {**call.attributes, name: value.most}
    return replace(call, attributes=attributes, courses={**call.courses, name: value})
