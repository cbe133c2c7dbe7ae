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
from rlgraph.passes.check_laws import raise_broken
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
    raise_broken(STREAM_LAWS, StreamView(graph, generating))

    rollouts = {node.name: _streaming_rollout(node, settings.chunk) for node in generating}
    streaming = graph.with_nodes(rollouts)
    has_region = any(node.refill for node in streaming.nodes)
    if has_region:
        return streaming

    # what a node may read one group after the other depends on the types and rows of its columns
    typed = infer(streaming)
    raise_broken(TYPED_STREAM_LAWS, StreamView(typed, generating))
    inside = _continued_by_group(typed, generating)
    behind_filter = {}
    for name in _readers_outside(typed, inside):
        behind_filter[name] = _reading_finished(streaming.node(name), rollouts.keys())
    streaming = streaming.with_nodes(behind_filter)
    return replace(streaming, nodes=(*streaming.nodes, _finished(generating[0])))


def _streaming_rollout(node: Node, chunk: int) -> Node:
    """Return a rollout as the op that leaves what has not ended, every ``chunk`` tokens."""
    call = node.called
    leaves_already = bool(node.op.declared.leaves)
    if leaves_already:
        attributes = _with_chunks(call.attributes, chunk)
        return replace(node, call=_with_outputs(replace(call, attributes=attributes)))

    name = node.op.declared.streams
    op = load(OPS[name], name)
    fields = op.attributes.model_fields
    attributes = {key: field.default for key, field in fields.items() if not field.is_required()}
    for key, value in call.attributes.items():
        if key in fields:
            attributes[key] = value
    attributes = _with_chunks(attributes, chunk)
    return replace(node, call=replace(call, op=op, target=OPS[name], attributes=attributes))


def _with_outputs(call: Call) -> Call:
    """Return a call with the columns that its op writes only with attributes that it has by now."""
    declared = load(call.target, call.op.name)
    known = {port.name for port in call.op.outputs}
    outputs = [*call.op.outputs]
    for port in declared.written(call.attributes):
        if port.name not in known:
            outputs.append(port)
    return replace(call, op=replace(call.op, outputs=tuple(outputs)))


def _with_chunks(attributes: Mapping[str, Any], chunk: int) -> dict[str, Any]:
    """Return attributes with which a rollout leaves what has not ended, and engines go on with that."""
    streaming = dict(attributes)
    if "chunk" in attributes:
        streaming["chunk"] = attributes["chunk"] or chunk
    if "stays" in attributes:
        streaming["stays"] = True
    return streaming


def _reading_finished(node: Node, generating: Collection[str]) -> Node:
    """Return a node behind the filter: what it reads of the rollouts' rows are those that have finished."""
    if not node.rows:
        return replace(node, rows=(FINISHED,))
    rows = [FINISHED if name in generating else name for name in node.rows]
    return replace(node, rows=tuple(rows))


def _continued_by_group(graph: Graph, generating: Sequence[Node]) -> set[str]:
    """Return the nodes whose rows go on one group after the other: up to the rollout, and behind it."""
    rollouts = [node.name for node in generating]
    needed = reached(graph.needs, rollouts, waits=lambda *_: True)
    inside: set[str] = set()
    for node in graph.in_order:
        if node.call is None:
            continue
        if node.name in needed:
            inside.add(node.name)
            continue
        # behind the rollout a node goes on by group as long as all that it reads comes by group
        writers = _writers_read(graph, node)
        reads_only_groups = bool(writers) and writers <= inside
        if reads_only_groups and not more_than_a_group(graph, node):
            inside.add(node.name)
    return inside


def _readers_outside(graph: Graph, inside: Collection[str]) -> set[str]:
    """Return the user's nodes outside of some that read what one of these writes."""
    readers = set()
    for node in graph.nodes:
        if node.call is None or node.name in inside:
            continue
        reads_inside = not _writers_read(graph, node).isdisjoint(inside)
        if reads_inside:
            readers.add(node.name)
    return readers


def _writers_read(graph: Graph, node: Node) -> set[str]:
    """Return the user's nodes that wrote what a node reads."""
    return {writer(graph, column).name for column in node.reads}


def _finished(rollout: Node) -> Node:
    """Return the filter that keeps all rows of what has ended."""
    ins = {"group": rollout.called.outs.get("group", "group")}
    call = Call(load(OPS[KEEPS_ALL], KEEPS_ALL), OPS[KEEPS_ALL], {}, ins)
    return Node(name=FINISHED, call=call, refill=Refill(), mark=rollout.mark)
