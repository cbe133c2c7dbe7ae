"""Makes generation for training a region that streams: ``schedule.buffer`` by group.

    prompts ─> rollout ─> rewards ─┐                              groups, each as it finishes
                  └── tokens ──────┴─> finished ─> collect ─> advantages ─> update

The region is a filter's with ``refill`` (see refill.py), the graph's own or one that keeps all rows, behind
all that needs no weights of a model that is trained, and sees rows or groups alone. The rollout is replaced
by the op that leaves what has not ended for later (``@op(streams=...)``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlgraph.errors import raise_problems
from rlgraph.frontend.infer import infer
from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Call, Graph, Node
from rlgraph.ir.regions import FINISHED
from rlgraph.ir.trace import writer
from rlgraph.laws.streams import (
    STREAM_LAWS,
    TYPED_STREAM_LAWS,
    is_on_separate_pool,
    more_than_a_group,
    serving_trained,
)
from rlgraph.laws.views import StreamView
from rlgraph.nodes import OPS
from rlgraph.ops.registry import load
from rlgraph.syntax.settings import Refill

KEEPS_ALL = "filter.all"


def stream(graph: Graph) -> Graph:
    """Give a graph whose generation streams the filter behind which its rows are collected as they finish.

    Raises:
        GraphError: nothing generates on a pool of its own, a node before the rollout can't be repeated, or a
            rollout can't leave what has not ended.
    """
    settings = graph.schedule.stream
    if settings is None or graph.report:
        return graph
    generating = [node for node in serving_trained(graph) if is_on_separate_pool(graph, node)]
    view = StreamView(graph, generating)
    raise_problems(problem for law in STREAM_LAWS for problem in law(view))
    names = {node.name for node in generating}
    nodes = [_leaving(node, settings.chunk) if node.name in names else node for node in graph.nodes]
    if any(node.refill for node in nodes):
        return replace(graph, nodes=tuple(nodes))
    typed = infer(replace(graph, nodes=tuple(nodes)))
    view = StreamView(typed, generating)
    raise_problems(problem for law in TYPED_STREAM_LAWS for problem in law(view))
    readers = _readers_of(typed, _going_on_by_groups(typed, generating))
    behind = [_reading_finished(node, names) if node.name in readers else node for node in nodes]
    return replace(graph, nodes=(*behind, _finished(generating[0])))


def _leaving(node: Node, chunk: int) -> Node:
    """Return a rollout as the op that leaves what has not ended, every ``chunk`` tokens."""
    call = node.called
    if node.op.declared.leaves:
        attributes = _going_on(call.attributes, chunk)
        return replace(node, call=_with_outputs(replace(call, attributes=attributes)))
    name = node.op.declared.streams
    op = load(OPS[name], name)
    fields = op.attributes.model_fields
    attributes = {key: field.default for key, field in fields.items() if not field.is_required()}
    attributes |= {key: value for key, value in call.attributes.items() if key in fields}
    streaming = replace(call, op=op, target=OPS[name], attributes=_going_on(attributes, chunk))
    return replace(node, call=streaming)


def _with_outputs(call: Call) -> Call:
    """Return a call with the columns that its op writes only with attributes that it has by now."""
    declared = load(call.target, call.op.name)
    known = {port.name for port in call.op.outputs}
    further = [port for port in declared.written(call.attributes) if port.name not in known]
    return replace(call, op=replace(call.op, outputs=(*call.op.outputs, *further)))


def _going_on(attributes: Mapping[str, Any], chunk: int) -> dict[str, Any]:
    """Return attributes with which a rollout leaves what has not ended, and engines go on with that."""
    streaming = {"chunk": attributes.get("chunk") or chunk, "stays": True}
    return {**attributes, **{name: value for name, value in streaming.items() if name in attributes}}


def _reading_finished(node: Node, generating: Collection[str]) -> Node:
    """Return a node behind the filter: what it reads of the rollouts' rows are those that have finished."""
    rows = tuple(FINISHED if name in generating else name for name in node.rows)
    return replace(node, rows=rows or (FINISHED,))


def _going_on_by_groups(graph: Graph, generating: Sequence[Node]) -> set[str]:
    """Return the nodes whose rows go on one group after the other: up to the rollout, and behind it."""
    needed = reached(graph.needs, [node.name for node in generating], waits=lambda *_: True)
    inside: set[str] = set()
    for node in graph.in_order:
        if not node.call:
            continue
        makers = {writer(graph, column).name for column in node.reads}
        follows = bool(makers) and makers <= inside and not more_than_a_group(graph, node)
        if node.name in needed or follows:
            inside.add(node.name)
    return inside


def _readers_of(graph: Graph, names: Collection[str]) -> set[str]:
    """Return the user's nodes outside of some that read what one of these writes."""
    readers = set()
    for node in graph.nodes:
        makers = {writer(graph, column).name for column in node.reads}
        if node.call and node.name not in names and not makers.isdisjoint(names):
            readers.add(node.name)
    return readers


def _finished(rollout: Node) -> Node:
    """Return the filter that keeps all rows of what has ended."""
    ins = {"group": rollout.called.outs.get("group", "group")}
    call = Call(load(OPS[KEEPS_ALL], KEEPS_ALL), OPS[KEEPS_ALL], {}, ins)
    return Node(name=FINISHED, call=call, refill=Refill(), mark=rollout.mark)
