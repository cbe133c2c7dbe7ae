"""Propagates intervals: an update runs by its `every` and `from`, all else when it is needed.

    update_policy: from 20  <- advantages <- rewards      from 20
    update_critic           <- values                     in every iteration

A node that leads to steps which are all left out is left out with them.
"""

from __future__ import annotations

from dataclasses import replace

from rlgraph.errors import fail
from rlgraph.ir.graph import Graph
from rlgraph.ir.intervals import COUNTED, Cadences, count, cycle, due, settled, union, words


def skip(graph: Graph) -> Graph:
    """Set every node's ``when``: that of its readers, or of the nodes that wait for it as for a sync.

    Raises:
        GraphError: in some iteration nothing would run.
    """
    if not any(node.when for node in graph.nodes):
        return graph
    inserted = {node.name for node in graph.nodes if node.inserted}
    when: dict[str, Cadences] = {}
    for node in reversed(graph.in_order):
        leads = [
            when[reader]
            for reader, _, columns in graph.needs.in_edges(node.name, data="columns")
            if columns or inserted & {reader, node.name}
        ]
        when[node.name] = union(leads) if leads else node.when
    changed = replace(graph, nodes=tuple(replace(node, when=when[node.name]) for node in graph.nodes))
    _no_idle_iteration(changed)
    last = graph.schedule.iterations
    late = [node for node in changed.nodes if node.updates and last and not count(node.when, last)]
    never = (f"`{node.name}` never runs: {words(node.when)}, of {last} iterations" for node in late)
    return replace(changed, notes=(*changed.notes, *never))


def _no_idle_iteration(graph: Graph) -> None:
    roots = [node for node in graph.nodes if not (node.writes or node.inserted or node.joins)]
    when = [node.when for node in roots]
    if not all(when):
        return
    last = min(settled(when) + cycle(when), COUNTED)
    idle = next((t for t in range(1, last) if not any(due(w, t) for w in when)), None)
    if idle:
        said = ", ".join(f"`{node.name}` {words(node.when)}" for node in roots)
        law = f"in iteration {idle} nothing would run: {said}"
        remedy = f"leave out {roots[0].name}.every and {roots[0].name}.from, or let another update run then"
        raise fail("idle-iteration", law, roots[0].mark, remedy=remedy)
