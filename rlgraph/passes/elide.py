"""Eliminates redundant recomputes that the versions prove, and reports work that is done twice.

``old_logprobs`` of the weights that an update starts from, with one optimizer step, are the log-probs that
the update computes itself: the ratio is 1 at every token, and its gradient is that of the log-probs.
"""

from __future__ import annotations

from dataclasses import replace

from rlgraph.ir.graph import Graph, Node

COLUMN = "old_logprobs"


def elide(graph: Graph) -> Graph:
    """Drop a recompute of ``old_logprobs`` that its only reader, an update, makes redundant.

    It stays with ``keep: true``, with several optimizer steps, and where anything else reads it.
    """
    for node in graph.nodes:
        if reader := _only_reader(graph, node):
            graph = _without(graph, node, reader)
    return replace(graph, notes=graph.notes + _twins(graph))


def _only_reader(graph: Graph, node: Node) -> Node | None:
    """Return the update that makes a node redundant, if there is one."""
    if not node.call or node.call.value("keep", True):  # what can be left out has an attribute to keep it
        return None
    readers = graph.readers(node.writes[0])
    if len(readers) != 1 or not readers[0].trains or node.writes[0] in graph.report.values():
        return None
    (reader,) = readers
    same = (reader.model, reader.version) == (node.model, node.version)
    ports = [port for port, column in reader.called.ins.items() if column == node.writes[0]]
    alike = reader.called.value("temperature") == node.call.value("temperature")
    alike = alike and reader.called.course("temperature") == node.call.course("temperature")
    return reader if same and alike and ports == [COLUMN] and reader.optimizer_steps == 1 else None


def _without(graph: Graph, node: Node, reader: Node) -> Graph:
    (column,) = node.writes
    ins = {port: source for port, source in reader.called.ins.items() if port != COLUMN}
    changed = replace(
        reader,
        call=replace(reader.called, ins=ins),
        reads=tuple(read for read in reader.reads if read != column),
        after=tuple(name for name in reader.after if name != node.name),
    )
    nodes = tuple(changed if n is reader else n for n in graph.nodes if n is not node)
    why = f"`{reader.name}` makes one optimizer step from {node.model}@v, so its own log-probs are these"
    note = f"left out `{node.name}`: {why} (keep it by {node.name}.keep=true)"
    columns = {name: kept for name, kept in graph.columns.items() if name != column}
    return replace(graph, nodes=nodes, columns=columns, notes=(*graph.notes, note))


def _twins(graph: Graph) -> tuple[str, ...]:
    """Return notes of nodes that compute the same from the same: reported, never merged."""
    seen: dict[str, str] = {}
    notes = []
    for node in graph.nodes:
        if node.call and node.op.engine == "train" and not node.trains:
            call, weights = node.call, (node.model, node.version)
            key = repr((call.target, weights, node.reads, sorted(call.attributes.items()), call.courses))
            twin = seen.setdefault(key, node.name)
            if twin != node.name:
                both = f"`{twin}` and `{node.name}`"
                notes.append(f"{both} compute the same: one could read the other's column")
    return tuple(notes)
