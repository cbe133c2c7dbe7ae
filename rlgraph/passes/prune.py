"""Drops nodes that nothing uses, and says so."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Graph, Node


def prune(graph: Graph) -> Graph:
    """Keep the nodes that update a model or lead to one that does.

    In an evaluation, keep those that lead to what is reported. A graph with neither keeps everything.
    """
    early = {node.name for node in graph.nodes if node.reads_next or node.inserted}
    roots = [node.name for node in _roots(graph)]
    used = reached(graph.needs, roots, waits=lambda node, _: node in early)
    if not graph.report and not any(node.updates for node in graph.nodes):
        graph = replace(graph, notes=(*graph.notes, "no node updates a model: nothing is trained"))
    return _without(graph, used)


def _roots(graph: Graph) -> list[Node]:
    if graph.report:
        return [node for node in graph.nodes if {*node.writes} & {*graph.report.values()}]
    return [node for node in graph.nodes if node.updates] or list(graph.nodes)


def _without(graph: Graph, used: set[str]) -> Graph:
    dead = [node for node in graph.nodes if node.name not in used]
    if not dead:
        return graph
    kept = [replace(n, after=tuple(a for a in n.after if a in used)) for n in graph.nodes if n.name in used]
    why = "leads to nothing that is reported" if graph.report else "leads to no update"
    notes = tuple(f"pruned `{node.name}`: it {why}" for node in dead if not node.inserted)
    gone = {column for node in dead for column in node.writes}
    columns = {name: column for name, column in graph.columns.items() if name not in gone}
    return replace(graph, nodes=tuple(kept), columns=columns, notes=graph.notes + notes)
