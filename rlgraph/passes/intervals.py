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
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.intervals import Cadences, count, cycle, settled, union, within, words
from rlgraph.laws.rows import CADENCE_LAWS, holds_rows, no_idle_iteration
from rlgraph.laws.views import CadenceView
from rlgraph.passes.check_laws import raise_broken


def skip(graph: Graph) -> Graph:
    """Set every node's ``when``: that of its readers, or of the nodes that wait for it as for a sync.

    Raises:
        GraphError: in some iteration nothing would run; a node runs in iterations without what it reads, or
            without any rows.
    """
    if graph.report:  # an evaluation runs whole
        return _with_intervals(graph, dict.fromkeys((node.name for node in graph.nodes), ()))
    available = _available(graph)
    raise_broken(CADENCE_LAWS, CadenceView(graph, available))
    skips_iterations = any(node.when for node in graph.nodes)
    if not skips_iterations:
        return graph
    changed = _with_intervals(graph, _needed(graph, available))
    raise_problems(no_idle_iteration(changed))
    return replace(changed, notes=(*changed.notes, *_never_run(changed)))


def _with_intervals(graph: Graph, intervals: Mapping[str, Cadences]) -> Graph:
    nodes = [replace(node, when=intervals[node.name]) for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def _needed(graph: Graph, available: Mapping[str, Cadences]) -> dict[str, Cadences]:
    """Return the iterations in which each node runs: those of its readers, as far as its rows are there."""
    inserted = {node.name for node in graph.nodes if node.inserted}
    intervals: dict[str, Cadences] = {}
    for node in reversed(graph.in_order):
        users = []
        for reader, columns in graph.needs.predecessors(node.name).items():
            # nodes of the user that only wait for each other may each run without the other
            waits_for_insertion = node.name in inserted or reader in inserted
            if columns or waits_for_insertion:
                users.append(intervals[reader])
        needed = union(users) if users else node.when
        intervals[node.name] = _as_far_as_there(node, needed, available[node.name])
    return intervals


def _as_far_as_there(node: Node, needed: Cadences, with_rows: Cadences) -> Cadences:
    """Return the iterations in which a node that is needed in some runs, by those in which its rows come."""
    if holds_rows(node):  # it takes in all rows that come
        return union([needed, with_rows])
    if within(needed, with_rows):
        return needed
    return with_rows


def _never_run(graph: Graph) -> Iterator[str]:
    """Yield notes of updates that run in no iteration."""
    iterations = graph.schedule.iterations
    if not iterations:
        return
    for node in graph.nodes:
        if node.updates and count(node.when, iterations) == 0:
            yield f"`{node.name}` never runs: {words(node.when)}, of {iterations} iterations"


def _available(graph: Graph) -> Mapping[str, Cadences]:
    """Return in which iterations what each node reads is there; of one that holds rows, new ones."""
    available: dict[str, Cadences] = {}
    for node in graph.in_order:
        limits = []
        for column in node.reads:
            writer = graph.writers[column]
            if not holds_rows(writer):  # one that holds rows gives some in every iteration
                limits.append(available[writer.name])
        if node.writes:  # an update's own cadence limits when it runs, and no reader
            limits.append(node.when)
        available[node.name] = max(limits, key=_rarity, default=())
    return available


def _rarity(intervals: Cadences) -> tuple[int, int]:
    """Return a key that sorts intervals from the most to the least frequent."""
    return settled([intervals]), cycle([intervals])
