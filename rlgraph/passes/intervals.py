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

from rlgraph.errors import GraphError, Problem, fail
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.intervals import COUNTED, Cadences, count, cycle, due, settled, union, within, words
from rlgraph.ir.trace import draw


def skip(graph: Graph) -> Graph:
    """Set every node's ``when``: that of its readers, or of the nodes that wait for it as for a sync.

    Raises:
        GraphError: in some iteration nothing would run; a node runs in iterations without what it reads, or
            without any rows.
    """
    if graph.report:  # an evaluation runs whole
        return replace(graph, nodes=tuple(replace(node, when=()) for node in graph.nodes))
    comes = _comes(graph)
    if problems := [*_misses(graph, comes), *_empty(graph, comes)]:
        raise GraphError(problems)
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
        wanted, own = union(leads) if leads else node.when, comes[node.name]
        if _holds(node):  # it takes in all that comes
            when[node.name] = union([wanted, own])
        else:
            when[node.name] = wanted if within(wanted, own) else own
    changed = replace(graph, nodes=tuple(replace(node, when=when[node.name]) for node in graph.nodes))
    _no_idle_iteration(changed)
    last = graph.schedule.iterations
    late = [node for node in changed.nodes if node.updates and last and not count(node.when, last)]
    never = (f"`{node.name}` never runs: {words(node.when)}, of {last} iterations" for node in late)
    return replace(changed, notes=(*changed.notes, *never))


def _holds(node: Node) -> bool:
    return node.call is not None and node.op.declared.holds


def _comes(graph: Graph) -> Mapping[str, Cadences]:
    """Return in which iterations what each node reads is there; of one that holds rows, new ones."""
    comes: dict[str, Cadences] = {}
    writers = {column: node for node in graph.nodes for column in node.writes}
    for node in graph.in_order:
        own = (node.when,) if node.writes else ()
        read = (comes[writer.name] for column in node.reads if not _holds(writer := writers[column]))
        comes[node.name] = max((*read, *own), key=_seldom, default=())
    return comes


def _seldom(when: Cadences) -> tuple[int, int]:
    return settled([when]), cycle([when])


def _misses(graph: Graph, comes: Mapping[str, Cadences]) -> Iterator[Problem]:
    """Yield nodes that run in iterations in which something that they read is not written."""
    writers = {column: node for node in graph.nodes for column in node.writes}
    for node in graph.nodes if any(comes.values()) else ():
        own = comes[node.name] if node.writes else node.when
        read = [writer for writer in map(writers.__getitem__, node.reads) if not _holds(writer)]
        missed = next((writer for writer in read if not within(own, comes[writer.name])), None)
        if missed is None or _holds(node):
            continue
        often = comes[missed.name]
        first = next(n for n in graph.in_order if n.writes and n.when and comes[n.name] == often)
        law = f"node `{node.name}` runs {words(own) or 'in every iteration'}; what it reads of "
        law += f"`{first.name}` comes {words(often)}"
        maker = graph.domains[str(missed.domain)].maker
        last = f"{{op: replay, rows: {maker}, fresh: true, capacity: 1024, max_age: {often[0].every - 1}}}"
        remedy = (
            f"set: {{{node.name}.every: {often[0].every}, {node.name}.from: {often[0].first}}}; or let rows "
        )
        remedy += f"last: add: {{kept: {last}}}, and set: {{{node.name}.rows: kept}}"
        yield Problem(
            "misses-rows", law, first.edited or first.mark, (), remedy, draw(graph, [first.name, node.name])
        )


def _empty(graph: Graph, comes: Mapping[str, Cadences]) -> Iterator[Problem]:
    """Yield nodes that run in iterations in which what holds their rows has none."""
    for node in graph.nodes:
        lines = graph.origins(node.domain) if node.call and not node.writes else []
        if not lines or not all(line and line[-1].held for line in lines):
            continue
        made = lines[0][-1]
        holder, often, ages = graph.node(made.maker), comes[made.maker], made.ages
        empty = _without_rows(node.when, often, ages)
        if empty is None:
            continue
        law = f"in iteration {empty} `{holder.name}` has no rows for `{node.name}`: they come "
        law += f"{words(often) or 'in every iteration'}, and are given when they are {ages[0]} to {ages[1]} "
        law += "iterations old"
        oldest = max(ages[1], cycle([often]) - 1)
        edits = {f"{holder.name}.{holder.called.name_of('fresh')}": "true"} if ages[0] else {}
        edits |= {f"{holder.name}.{holder.called.name_of('oldest')}": str(oldest)} if oldest > ages[1] else {}
        if _without_rows(node.when, often, (0, oldest)):
            first = next((n for n in graph.in_order if n.writes and n.when), node)
            edits[f"{first.name}.from"] = "1"
        remedy = f"set: {{{', '.join(f'{path}: {value}' for path, value in edits.items())}}}"
        yield Problem("no-rows-held", law, holder.edited or holder.mark, (), remedy)


def _without_rows(when: Cadences, comes: Cadences, ages: tuple[int, int]) -> int | None:
    """Return the first iteration in which a node runs, and no rows of these ages have come."""
    last = min(settled([when, comes]) + cycle([when, comes]) + ages[1], COUNTED)
    came = [due(comes, iteration) and iteration > 0 for iteration in range(last + 1)]
    for iteration in range(1, last + 1):
        young, old = iteration - ages[0], max(iteration - ages[1], 1)
        if due(when, iteration) and not any(came[old : young + 1]):
            return iteration
    return None


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
