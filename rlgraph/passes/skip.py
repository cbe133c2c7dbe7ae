"""Say in which iterations each node runs: an update by its `every` and `from`, all else when it is needed.

    update_policy: from 20  <- advantages <- rewards      from 20
    update_critic           <- values                     in every iteration

A node that leads to steps which are all left out is left out with them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from rlgraph.cadence import COUNTED, Cadences, count, cycle, due, settled, union, words
from rlgraph.errors import fail
from rlgraph.graph import Graph
from rlgraph.passes.order import sequence


def skip(graph: Graph) -> Graph:
    """Every node's ``when``: that of those that read what it writes, or that wait for it as for a sync.

    Raises:
        GraphError: in some iteration nothing would run.
    """
    if not any(node.when for node in graph.nodes):
        return graph
    writers = {column: node.name for node in graph.nodes for column in node.writes}
    found: dict[str, Cadences] = {}
    readers: dict[str, list[Cadences]] = defaultdict(list)
    for node in reversed(sequence(graph.nodes)):
        found[node.name] = union(readers[node.name]) if readers[node.name] else node.when
        waits = [name for name in node.after if node.inserted or graph.node(name).inserted]
        for need in {*(writers[column] for column in node.reads), *waits}:
            readers[need].append(found[node.name])
    changed = replace(graph, nodes=tuple(replace(node, when=found[node.name]) for node in graph.nodes))
    _no_idle_iteration(changed)
    return replace(changed, notes=changed.notes + _never(changed))


def _never(graph: Graph) -> tuple[str, ...]:
    """Updates that would begin after the last iteration."""
    last = graph.schedule.iterations
    late = [node for node in graph.nodes if node.updates and last and not count(node.when, last)]
    return tuple(f"`{node.name}` never runs: {words(node.when)}, of {last} iterations" for node in late)


def _no_idle_iteration(graph: Graph) -> None:
    roots = [node for node in graph.nodes if not node.writes and not node.inserted]
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
