"""Propagates intervals: an update runs by its `every` and `from`, all else when it is needed.

    update_policy: from 20  <- advantages <- rewards      from 20
    update_critic           <- values                     in every iteration

A node that leads to steps which are all left out is left out with them. What writes columns may say `every`
as well: with it runs all that leads to it, and what reads it; rows last longer where a node holds them.

    rollout: every 5 from 1 -> rewards -> kept            every 5 from 1
    update_policy           <- kept                       in every iteration
"""

from __future__ import annotations

from collections.abc import Mapping
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
    comes = _comes(graph)
    view = CadenceView(graph, comes)
    raise_problems(problem for law in CADENCE_LAWS for problem in law(view))
    if not any(node.when for node in graph.nodes):
        return graph
    inserted = {node.name for node in graph.nodes if node.inserted}
    when: dict[str, Cadences] = {}
    for node in reversed(graph.in_order):
        leads = [
            when[reader]
            for reader, columns in graph.needs.predecessors(node.name).items()
            if columns or inserted & {reader, node.name}
        ]
        wanted, own = union(leads) if leads else node.when, comes[node.name]
        if holds_rows(node):  # it takes in all that comes
            when[node.name] = union([wanted, own])
        else:
            when[node.name] = wanted if within(wanted, own) else own
    changed = replace(graph, nodes=tuple(replace(node, when=when[node.name]) for node in graph.nodes))
    raise_problems(no_idle_iteration(changed))
    last = graph.schedule.iterations
    late = [node for node in changed.nodes if node.updates and last and not count(node.when, last)]
    never = (f"`{node.name}` never runs: {words(node.when)}, of {last} iterations" for node in late)
    return replace(changed, notes=(*changed.notes, *never))


def _comes(graph: Graph) -> Mapping[str, Cadences]:
    """Return in which iterations what each node reads is there; of one that holds rows, new ones."""
    comes: dict[str, Cadences] = {}
    writers = {column: node for node in graph.nodes for column in node.writes}
    for node in graph.in_order:
        own = (node.when,) if node.writes else ()
        read = (comes[writer.name] for column in node.reads if not holds_rows(writer := writers[column]))
        comes[node.name] = max((*read, *own), key=_seldom, default=())
    return comes


def _seldom(when: Cadences) -> tuple[int, int]:
    return settled([when]), cycle([when])
