"""Makes a filter with ``refill`` a region, whose steps repeat until as many rows stay as are wanted.

    prompts ─> rollout ─> rewards ─> informative     again and again, each time with the next prompts
                  └─ tokens, rewards ──┴─> collect ─> tokens/informative: 512 rows, whatever it took

One ``collect`` takes the place of the selections. The region is all that leads to it from the data source
on; who reads its columns reads them behind the ``collect``, for only what the filter keeps leaves a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from rlgraph.errors import raise_problems
from rlgraph.ir.actions import Kind
from rlgraph.ir.graph import Column, Graph, Node, Region
from rlgraph.ir.regions import members
from rlgraph.laws.regions import REGION_LAWS, same_source
from rlgraph.laws.views import RegionView
from rlgraph.passes.check_laws import raise_broken
from rlgraph.units import plural

RECORDED = ("text[samples]", "float32[samples]")


def refill(graph: Graph) -> Graph:
    """Add a ``collect`` for every filter with ``refill`` whose rows are read; an evaluation has none.

    Raises:
        GraphError: steps that read rows of the region, or that can't be repeated; or a target that no whole
            groups make up.
    """
    if graph.report:
        return graph
    raise_problems(same_source(graph))
    views = []
    for node in graph.nodes:
        selects = _selects(graph, node) if node.refill else []
        if selects:
            graph = _collected(graph, node, selects)
            inside = members(graph, graph.node(f"collect:{node.name}"))
            views.append(RegionView(graph, graph.regions[node.name], inside))
    raise_broken(REGION_LAWS, *views)
    return graph


def _selects(graph: Graph, filtering: Node) -> list[Node]:
    """Return the selections of the rows that a filter keeps, one per column that is read of them."""
    after = (filtering.name,)
    selects = [node for node in graph.nodes if node.kind is Kind.SELECT]
    return [node for node in selects if node.after == after]


def _collected(graph: Graph, filtering: Node, selects: Sequence[Node]) -> Graph:
    """Return the graph with one ``collect`` in place of the selections of a filter's rows."""
    region = _region(graph, filtering)
    recorded = _recorded_columns(graph, filtering, selects) if region.streams else {}
    reads = [node.reads[0] for node in selects]
    writes = [node.writes[0] for node in selects]
    columns = {**graph.columns}
    for name, column in recorded.items():
        reads.append(name)
        writes.append(column.name)
        columns[column.name] = column
    collect = Node(
        name=f"collect:{filtering.name}",
        kind=Kind.COLLECT,
        reads=tuple(reads),
        writes=tuple(writes),
        domain=selects[0].domain,
        after=(filtering.name,),
        because=_why_collected(region),
    )
    for name in collect.writes:
        columns[name] = replace(columns[name], writer=collect.name)
    replaced = {node.name for node in selects}
    remaining = [node for node in graph.nodes if node.name not in replaced]
    return replace(
        graph,
        nodes=(*remaining, collect),
        columns=columns,
        regions={**graph.regions, filtering.name: region},
    )


def _why_collected(region: Region) -> str:
    if region.streams:
        reason = f"`schedule.buffer`: rows come as they finish, and an iteration takes {region.rows} that "
        return reason + f"were begun at most {region.keep} {plural('update', region.keep)} before"
    tries = f"in {region.rounds} rounds at most" if region.rounds > 1 else "in one round"
    reason = f"`{region.filter}` refills: the steps from `{region.source}` on are repeated with the next "
    return reason + f"{region.kind} until {region.rows} rows stay, {tries}"


def _recorded_columns(graph: Graph, filtering: Node, selects: Sequence[Node]) -> dict[str, Column]:
    """Return what a samples file has of a row, and nothing behind the filter reads -> its column there."""
    read_behind = {node.reads[0] for node in selects}
    domain = graph.columns[selects[0].writes[0]].domain
    recorded = {}
    for name, column in graph.columns.items():
        if column.domain != filtering.domain or column.copy_of:
            continue
        if name in read_behind or name == filtering.writes[0]:
            continue
        if str(column.type) in RECORDED:
            copy = f"{name}/{filtering.name}"
            recorded[name] = replace(column, name=copy, domain=domain, copy_of=name)
    return recorded


def _region(graph: Graph, filtering: Node) -> Region:
    assert filtering.refill
    refill = filtering.refill
    schedule = graph.schedule
    waiting = schedule.stream or schedule.surplus
    policy = ""
    if schedule.surplus and schedule.surplus.order != "fifo":
        policy = schedule.surplus.order
    line = graph.ancestors(filtering.domain)
    source = graph.node(line[-1].maker)
    times = prod(domain.times for domain in line)
    rows = refill.rows
    if not rows:
        batch = source.called.value("rows", 0)
        rows = batch * times if isinstance(batch, int) else 0
    return Region(
        filter=filtering.name,
        source=source.name,
        kind=line[-1].kind,
        rows=rows,
        times=times,
        rounds=refill.rounds,
        expected=refill.expected,
        over_sample=refill.over_sample,
        keep=waiting.staleness if waiting else 0,
        policy=policy,
        streams=schedule.stream is not None,
    )
