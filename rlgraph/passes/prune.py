"""Drops nodes that nothing uses, and says so."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Graph


def prune(graph: Graph) -> Graph:
    """Keep the nodes that update a model or lead to one that does.

    In an evaluation, keep those that lead to what is reported. A graph with neither keeps everything.
    """
    roots = _roots(graph)
    if not roots and not graph.report:
        return replace(graph, notes=(*graph.notes, "no node updates a model: nothing is trained"))
    used = _used(graph, roots)
    remaining = []
    dropped = []
    for node in graph.nodes:
        if node.name in used:
            waits = tuple(name for name in node.after if name in used)
            remaining.append(replace(node, after=waits))
        else:
            dropped.append(node)
    if not dropped:
        return graph

    reason = "leads to nothing that is reported" if graph.report else "leads to no update"
    notes = [*graph.notes]
    columns = {**graph.columns}
    for node in dropped:
        if not node.inserted:
            notes.append(f"pruned `{node.name}`: it {reason}")
        for column in node.writes:
            columns.pop(column, None)
    return replace(
        graph,
        nodes=tuple(remaining),
        columns=columns,
        notes=tuple(notes),
        dropped=tuple(dropped),
    )


def _roots(graph: Graph) -> set[str]:
    """Return the nodes for whose sake a graph runs: those that train, or write what is reported."""
    reported = set(graph.report.values())
    roots = set()
    for node in graph.nodes:
        writes_report = not reported.isdisjoint(node.writes)
        is_root = writes_report if graph.report else node.trains
        if is_root:
            roots.add(node.name)
    return roots


def _used(graph: Graph, roots: set[str]) -> set[str]:
    """Return the roots and all that they need, with the nodes that keep a state which one of these reads."""
    waiting = set()  # what these wait for is needed, too
    for node in graph.nodes:
        if node.reads_next or node.inserted:
            waiting.add(node.name)
    while True:
        used = reached(graph.needs, roots, waits=lambda node, _: node in waiting)
        if graph.report:  # an evaluation only reads states
            return used
        keepers = _keepers_of_states(graph, used)
        if keepers <= roots:
            return used
        roots = roots | keepers


def _keepers_of_states(graph: Graph, readers: set[str]) -> set[str]:
    """Return the nodes whose states some nodes read."""
    keepers = set()
    for node in graph.nodes:
        if node.state and node.name in readers:
            keepers.add(node.state)
    return keepers
