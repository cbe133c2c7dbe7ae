"""Drops nodes that nothing uses, and says so."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Graph


def prune(graph: Graph) -> Graph:
    """Keep the nodes that update a model or lead to one that does.

    In an evaluation, keep those that lead to what is reported. A graph with neither keeps everything.
    """
    reported = set(graph.report.values())
    if reported:
        roots = {node.name for node in graph.nodes if reported.intersection(node.writes)}
    else:
        roots = {node.name for node in graph.nodes if node.trains}
    if not roots and not reported:
        return replace(graph, notes=(*graph.notes, "no node updates a model: nothing is trained"))
    used = _used(graph, roots)
    dropped = tuple(node for node in graph.nodes if node.name not in used)
    if not dropped:
        return graph
    remaining = []
    for node in graph.nodes:
        if node.name in used:
            waits = tuple(name for name in node.after if name in used)
            remaining.append(replace(node, after=waits))
    reason = "leads to nothing that is reported" if reported else "leads to no update"
    notes = [f"pruned `{node.name}`: it {reason}" for node in dropped if not node.inserted]
    unwritten = {column for node in dropped for column in node.writes}
    columns = {name: column for name, column in graph.columns.items() if name not in unwritten}
    return replace(
        graph, nodes=tuple(remaining), columns=columns, notes=(*graph.notes, *notes), dropped=dropped
    )


def _used(graph: Graph, roots: set[str]) -> set[str]:
    """Return the roots and all that they need, with the nodes that keep a state which one of these reads."""
    waiting = {node.name for node in graph.nodes if node.reads_next or node.inserted}
    while True:
        used = reached(graph.needs, roots, waits=lambda node, _: node in waiting)
        if graph.report:  # an evaluation only reads states
            return used
        states = {node.state for node in graph.nodes if node.state and node.name in used}
        if states <= roots:
            return used
        roots = roots | states
