"""Drops nodes that nothing uses, and says so."""

from __future__ import annotations

from dataclasses import replace

from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Graph


def prune(graph: Graph) -> Graph:
    """Keep the nodes that update a model or lead to one that does.

    In an evaluation, keep those that lead to what is reported. A graph with neither keeps everything.
    """
    early = {node.name for node in graph.nodes if node.reads_next or node.inserted}
    reported = {*graph.report.values()}
    roots = [node for node in graph.nodes if (reported & {*node.writes} if reported else node.trains)]
    if not roots and not reported:
        return replace(graph, notes=(*graph.notes, "no node updates a model: nothing is trained"))
    names, used = {node.name for node in roots}, set[str]()
    while not names <= used:
        used = reached(graph.needs, names, waits=lambda node, _: node in early)
        # a state that is read has to be kept; an evaluation only reads it
        names |= (
            set() if reported else {node.state for node in graph.nodes if node.state and node.name in used}
        )
    dead = [node for node in graph.nodes if node.name not in used]
    if not dead:
        return graph
    kept = [replace(n, after=tuple(a for a in n.after if a in used)) for n in graph.nodes if n.name in used]
    why = "leads to nothing that is reported" if graph.report else "leads to no update"
    notes = tuple(f"pruned `{node.name}`: it {why}" for node in dead if not node.inserted)
    gone = {column for node in dead for column in node.writes}
    columns = {name: column for name, column in graph.columns.items() if name not in gone}
    return replace(graph, nodes=(*kept,), columns=columns, notes=graph.notes + notes, dropped=(*dead,))
