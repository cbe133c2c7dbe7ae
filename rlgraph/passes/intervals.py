"""Propagates intervals: an update runs by its `every` and `from`, all else when it is needed.

    update_policy: from 20  <- advantages <- rewards      from 20
    update_critic           <- values                     in every iteration

A node that leads to steps which are all left out is left out with them. What writes columns may say `every`
as well: with it runs all that leads to it, and what reads it; rows last longer where a node holds them.

    rollout: every 5 from 1 -> rewards -> kept            every 5 from 1
    update_policy           <- kept                       in every iteration
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlgraph.errors import raise_problems
from rlgraph.ir.graph import Graph
from rlgraph.ir.intervals import Cadences, count, cycle, settled, union, within, words
from rlgraph.laws.rows import CADENCE_LAWS, holds_rows, no_idle_iteration
from rlgraph.laws.views import CadenceView


def skip(graph: Graph) -> Graph:
    """Set every node's ``when``: that of its readers, or of the nodes that wait for it as for a sync.

    Raises:
        GraphError: in some iteration nothing would run; a node runs in iterations without what it reads, or
            without any rows.
    """
    if graph.report:  # an evaluation runs whole
        return replace(graph, nodes=tuple(replace(node, when=()) for node in graph.nodes))
    comes = _available(graph)
    view = CadenceView(graph, comes)
    raise_problems(problem for law in CADENCE_LAWS for problem in law(view))
    if not any(node.when for node in graph.nodes):
        return graph
    when = _when_needed(graph, comes)
    changed = replace(graph, nodes=tuple(replace(node, when=when[node.name]) for node in graph.nodes))
    raise_problems(no_idle_iteration(changed))
    return replace(changed, notes=(*changed.notes, *_never_run(changed)))


def _when_needed(graph: Graph, available: Mapping[str, Cadences]) -> dict[str, Cadences]:
    """Return the iterations in which each node runs: those of its readers, as far as its rows are there."""
    inserted = {node.name for node in graph.nodes if node.inserted}
    when: dict[str, Cadences] = {}
    for node in reversed(graph.in_order):
        users = []
        for reader, columns in graph.needs.predecessors(node.name).items():
            waits_for_insertion = node.name in inserted or reader in inserted
            if columns or waits_for_insertion:
                users.append(when[reader])
        needed = union(users) if users else node.when
        comes = available[node.name]
        if holds_rows(node):  # it takes in all that comes
            when[node.name] = union([needed, comes])
        else:
            when[node.name] = needed if within(needed, comes) else comes
    return when


def _never_run(graph: Graph) -> Iterator[str]:
    """Yield notes of updates that run in no iteration."""
    iterations = graph.schedule.iterations
    for node in graph.nodes:
        if node.updates and iterations and not count(node.when, iterations):
            yield f"`{node.name}` never runs: {words(node.when)}, of {iterations} iterations"


def _available(graph: Graph) -> Mapping[str, Cadences]:
    """Return in which iterations what each node reads is there; of one that holds rows, new ones."""
    available: dict[str, Cadences] = {}
    for node in graph.in_order:
        writers = [graph.writers[column] for column in node.reads]
        cadences = [available[writer.name] for writer in writers if not holds_rows(writer)]
        if node.writes:
            cadences.append(node.when)
        available[node.name] = max(cadences, key=_seldom, default=())
    return available


def _seldom(when: Cadences) -> tuple[int, int]:
    return settled([when]), cycle([when])
