"""Fills in attributes that follow from the rest of the graph.

``temperature``, where an op leaves it open (null), is that of the rollout that made its rows: log-probs are
of the distribution that was sampled from. Another value is refused.
"""

from __future__ import annotations

from dataclasses import replace

from rlgraph.ir.graph import Call, Graph, Node
from rlgraph.ir.schedules import ValueSchedule
from rlgraph.ir.trace import sampler
from rlgraph.laws.rows import TEMPERATURE_LAWS, scores_at_temperature, temperature
from rlgraph.laws.views import NodeView
from rlgraph.passes.check_laws import raise_broken


def resolve(graph: Graph) -> Graph:
    """Resolve every ``temperature`` of a train engine's node to a number.

    Raises:
        GraphError: a node scores samples at another temperature than they were drawn at.
    """
    raise_broken(TEMPERATURE_LAWS, *(NodeView(graph, node) for node in graph.nodes))
    resolved = {node.name: _resolved(graph, node) for node in graph.nodes if scores_at_temperature(node)}
    return graph.with_nodes(resolved)


def _resolved(graph: Graph, node: Node) -> Node:
    value = temperature(node)
    rollout = sampler(graph, node.domain)
    if not value and rollout:
        value = temperature(rollout)
    return replace(node, call=_with_temperature(node.called, value or 1.0))


def _with_temperature(call: Call, value: float | ValueSchedule) -> Call:
    name = call.name_of("temperature")
    if not isinstance(value, ValueSchedule):
        return replace(call, attributes={**call.attributes, name: value})
    return replace(
        call,
        attributes={**call.attributes, name: value.most},
        courses={**call.courses, name: value},
    )
