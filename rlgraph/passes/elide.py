"""Eliminates redundant recomputes that the versions prove, and reports work that is done twice.

``old_logprobs`` of the weights that an update starts from, with one optimizer step, are the log-probs that
the update computes itself: the ratio is 1 at every token, and its gradient is that of the log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlgraph.ir.graph import Graph, Node

COLUMN = "old_logprobs"


def elide(graph: Graph) -> Graph:
    """Drop a recompute of ``old_logprobs`` that its only reader, an update, makes redundant.

    It stays with ``keep: true``, with several optimizer steps, and where anything else reads it.
    """
    for node in graph.nodes:
        reader = _only_reader(graph, node)
        if reader:
            graph = _without(graph, node, reader)
    return replace(graph, notes=(*graph.notes, *_twins(graph)))


def _only_reader(graph: Graph, node: Node) -> Node | None:
    """Return the update that makes a node redundant, if there is one."""
    if not node.call or node.call.value("keep", True):  # what can be left out has an attribute to keep it
        return None
    column = node.writes[0]
    readers = graph.readers(column)
    is_reported = column in graph.report.values()
    if is_reported or len(readers) != 1:
        return None

    reader = readers[0]
    if not reader.trains or reader.optimizer_steps != 1:
        return None  # from the second step on, its weights are not those that scored
    ports = [port for port, name in reader.called.ins.items() if name == column]
    if ports != [COLUMN]:
        return None
    if _weights(reader) != _weights(node):
        return None
    if _temperature(reader) != _temperature(node):
        return None
    return reader


def _weights(node: Node) -> tuple[str | None, int | None]:
    return node.model, node.version


def _temperature(node: Node) -> tuple[object, object]:
    """Return a node's temperature, and how it changes over the iterations."""
    return node.called.value("temperature"), node.called.course("temperature")


def _without(graph: Graph, node: Node, reader: Node) -> Graph:
    """Return the graph without a node whose column an update computes itself."""
    (column,) = node.writes
    ins = dict(reader.called.ins)
    del ins[COLUMN]
    changed = replace(
        reader,
        call=replace(reader.called, ins=ins),
        reads=tuple(name for name in reader.reads if name != column),
        after=tuple(name for name in reader.after if name != node.name),
    )
    nodes = []
    for remaining in graph.nodes:
        if remaining is reader:
            nodes.append(changed)
        elif remaining is not node:
            nodes.append(remaining)
    columns = dict(graph.columns)
    del columns[column]
    reason = f"`{reader.name}` makes one optimizer step from {node.model}@v, so its own log-probs are these"
    note = f"left out `{node.name}`: {reason} (keep it by {node.name}.keep=true)"
    return replace(graph, nodes=tuple(nodes), columns=columns, notes=(*graph.notes, note))


def _twins(graph: Graph) -> Iterator[str]:
    """Yield notes of nodes that compute the same from the same: reported, never merged."""
    by_work: dict[str, str] = {}
    for node in graph.nodes:
        scores = node.call is not None and node.op.engine == "train" and not node.trains
        if not scores:
            continue
        call = node.called
        attributes = sorted(call.attributes.items())
        work = repr((call.target, _weights(node), node.reads, attributes, call.courses))
        twin = by_work.setdefault(work, node.name)
        if twin != node.name:
            yield f"`{twin}` and `{node.name}` compute the same: one could read the other's column"
