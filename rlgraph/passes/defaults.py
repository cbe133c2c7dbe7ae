"""Fills in attributes that follow from the rest of the graph.

``temperature``, where an op leaves it open (null), is that of the rollout that made its rows: log-probs are
of the distribution that was sampled from. Another value is refused.
"""

from __future__ import annotations

from dataclasses import replace

from rlgraph.errors import GraphError, Problem
from rlgraph.ir.graph import Call, Graph, Node
from rlgraph.ir.schedules import ValueSchedule
from rlgraph.ir.trace import refusal, sampler


def resolve(graph: Graph) -> Graph:
    """Resolve every ``temperature`` of a train engine's node to a number.

    Raises:
        GraphError: a node scores samples at another temperature than they were drawn at.
    """
    problems: list[Problem] = []
    nodes = tuple(_resolved(graph, node, problems) for node in graph.nodes)
    if problems:
        raise GraphError(problems)
    return replace(graph, nodes=nodes)


def _resolved(graph: Graph, node: Node, problems: list[Problem]) -> Node:
    if not (node.call and node.op.engine == "train" and node.call.name_of("temperature")):
        return node
    rollout, own = sampler(graph, node.domain), _temperature(node.call)
    drawn = _temperature(rollout.called) if rollout else None
    if rollout and own is not None and drawn is not None and own != drawn:
        law = f"node `{node.name}` scores at temperature {own}; `{rollout.name}` sampled at {drawn}"
        remedy = f"leave out {node.name}.temperature: it is the rollout's then"
        problems.append(refusal("temperature", law, graph, node, [rollout.name], remedy))
    if rollout and isinstance(drawn, ValueSchedule) and not all(value for _, value in drawn.points):
        law = f"node `{node.name}` scores what `{rollout.name}` samples at temperature {drawn}: "
        law += "at 0 there is no distribution to score by"
        remedy = f"let {rollout.name}.temperature stay above 0"
        problems.append(Problem("temperature", law, node.mark, (), remedy))
    return replace(node, call=_at(node.call, own or drawn or 1.0))


def _temperature(call: Call) -> float | ValueSchedule | None:
    """Return the temperature of a call; None where it is open, or 0: greedy has no distribution."""
    course = call.course("temperature")
    return course if isinstance(course, ValueSchedule) else call.value("temperature") or None


def _at(call: Call, temperature: float | ValueSchedule) -> Call:
    name = call.name_of("temperature")
    if not isinstance(temperature, ValueSchedule):
        return replace(call, attributes={**call.attributes, name: temperature})
    courses = {**call.courses, name: temperature}
    return replace(call, attributes={**call.attributes, name: temperature.most}, courses=courses)
