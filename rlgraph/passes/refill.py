"""Makes a filter with ``refill`` a region, whose steps repeat until as many rows stay as are wanted.

    prompts ─> rollout ─> rewards ─> informative     again and again, each time with the next prompts
                  └─ tokens, rewards ──┴─> collect ─> tokens/informative: 512 rows, whatever it took

One ``collect`` takes the place of the selections. The region is all that leads to it from the data source
on; who reads its columns reads them behind the ``collect``, for only what the filter keeps leaves a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from rlgraph.errors import GraphError, Problem
from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Column, Graph, Node, Region
from rlgraph.ir.steps import Kind
from rlgraph.ir.trace import draw, older, writer

TOLD = ("text[samples]", "float32[samples]")


def refill(graph: Graph) -> Graph:
    """Add a ``collect`` for every filter with ``refill`` whose rows are read; an evaluation has none.

    Raises:
        GraphError: steps that read rows of the region, or that can't be repeated; or a target that no whole
            groups make up.
    """
    if graph.report:
        return graph
    filters = [node for node in graph.nodes if node.refill and _selects(graph, node)]
    problems = [*_same_source(graph, filters)]
    for node in filters if not problems else ():
        graph = _collected(graph, node)
        inside = members(graph, graph.node(f"collect:{node.name}"))
        problems += [p for check in REGION_LAWS for p in check(graph, graph.regions[node.name], inside)]
    if problems:
        raise GraphError(problems)
    return graph


def members(graph: Graph, collect: Node) -> list[Node]:
    """Return the nodes of a region in order: its filter, and all that its ``collect`` is computed from."""
    copies = {node.name for node in graph.nodes if node.inserted}  # a selection needs its filter
    inside = reached(graph.needs, graph.needs[collect.name], waits=lambda node, _: node in copies)
    return [node for node in graph.nodes if node.name in inside]


def collects(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that end a region."""
    return [node for node in nodes if node.kind.facts.collects]


def aged(graph: Graph) -> Graph:
    """Return the graph as its oldest rows see it: of a region that keeps a surplus, nodes read older weights.

    A row that waits for an iteration was sampled, and whatever was measured of it in the region, by the
    weights of the iteration before.
    """
    then: dict[str, Node] = {}
    for collect in collects(graph.nodes):
        waits = graph.regions[collect.after[0]].keep
        then |= {node.name: older(graph, node, waits) for node in members(graph, collect)}
    return replace(graph, nodes=tuple(then.get(node.name, node) for node in graph.nodes))


def _selects(graph: Graph, filtering: Node) -> list[Node]:
    after = (filtering.name,)
    return [node for node in graph.nodes if node.kind.facts.layout == "filter" and node.after == after]


def _collected(graph: Graph, filtering: Node) -> Graph:
    selects, region = _selects(graph, filtering), _region(graph, filtering)
    replaced = {node.name for node in selects}
    tries = f"in {region.rounds} rounds at most" if region.rounds > 1 else "in one round"
    because = f"`{filtering.name}` refills: the steps from `{region.source}` on are repeated with the next "
    because += f"{region.kind} until {region.rows} rows stay, {tries}"
    if region.streams:
        because = f"`schedule.stream`: rows come as they finish, and an iteration takes {region.rows} that "
        because += f"were begun at most {region.keep} update{'s' * (region.keep != 1)} before"
    told = _told(graph, filtering, selects) if region.streams else {}
    collect = Node(
        name=f"collect:{filtering.name}",
        kind=Kind.COLLECT,
        reads=(*(node.reads[0] for node in selects), *told),
        writes=(*(node.writes[0] for node in selects), *(column.name for column in told.values())),
        domain=selects[0].domain,
        after=(filtering.name,),
        because=because,
    )
    known = {**graph.columns, **{column.name: column for column in told.values()}}
    rewritten = {name: replace(known[name], writer=collect.name) for name in collect.writes}
    return replace(
        graph,
        nodes=(*(node for node in graph.nodes if node.name not in replaced), collect),
        columns={**graph.columns, **rewritten},
        regions={**graph.regions, filtering.name: region},
    )


def _told(graph: Graph, filtering: Node, selects: Sequence[Node]) -> dict[str, Column]:
    """Return what a samples file tells of a row, and nothing behind the filter reads -> its column there."""
    read, like = {node.reads[0] for node in selects}, graph.columns[selects[0].writes[0]]
    return {
        name: replace(column, name=f"{name}/{filtering.name}", domain=like.domain, copy_of=name)
        for name, column in graph.columns.items()
        if column.domain == filtering.domain and not column.copy_of and name not in read
        if str(column.type) in TOLD and name != filtering.writes[0]
    }


def _region(graph: Graph, filtering: Node) -> Region:
    assert filtering.refill
    wanted, line = filtering.refill, graph.ancestors(filtering.domain)
    source = graph.node(line[-1].maker)
    batch = source.called.value("rows", 0)
    times = prod(domain.times for domain in line)
    return Region(
        filter=filtering.name,
        source=source.name,
        kind=line[-1].kind,
        rows=wanted.rows or (batch * times if isinstance(batch, int) else 0),
        times=times,
        rounds=wanted.rounds,
        expected=wanted.expected,
        over_sample=wanted.over_sample,
        keep=wanted.keep,
        policy=wanted.policy or "",
        streams=graph.schedule.stream is not None,
    )


def _keeps_no_state(graph: Graph, region: Region, inside: Sequence[Node]) -> Iterator[Problem]:
    for node in inside:
        if node.call and node.op.declared.state == "keeps":
            law = (
                f"`{node.name}` keeps a state from iteration to iteration, and `{region.filter}` repeats it "
            )
            law += "in rounds"
            remedy = (
                "what a filter with `refill` reads keeps no state; read one in it, as filter.difficulty does"
            )
            yield Problem("state-in-rounds", law, node.mark, (), remedy)


def _source_given(graph: Graph, region: Region, inside: Sequence[Node]) -> Iterator[Problem]:
    source = graph.node(region.source)
    if not source.op.source or not isinstance(source.called.value("rows"), int):
        law = f"`{region.filter}` refills from `{source.name}` ({source.op.name}), which is asked for more "
        batch = source.called.name_of("rows") or "batch"
        law += f"prompts by its attribute `{batch}`, a number"
        yield Problem("no-batch", law, source.mark, (), f"set: {{{source.name}.{batch}: 128}}")


def _whole_groups(graph: Graph, region: Region, inside: Sequence[Node]) -> Iterator[Problem]:
    filtering = graph.node(region.filter)
    if filtering.op.declared.rows == "group" and region.rows % region.times:
        law = f"`{region.filter}` keeps whole groups of {region.times}; {region.rows} rows are none"
        rows = max(region.rows // region.times, 1) * region.times
        remedy = f"set: {{{region.filter}.refill.rows: {rows}}}"
        yield Problem("cut-groups", law, filtering.mark, (), remedy)


def _read_outside(graph: Graph, region: Region, inside: Sequence[Node]) -> Iterator[Problem]:
    """Check that only rows kept by the filter leave a region."""
    names, written = {node.name for node in inside}, {column for node in inside for column in node.writes}
    for node in graph.nodes:
        read = [column for column in node.reads if column in written]
        if read and node.name not in names and not node.kind.facts.collects:
            reader = _reader(graph, node)
            law = f"`{reader.name}` reads `{read[0]}` of all rows, and `{region.filter}` refills: only the "
            law += "rows that it keeps are collected"
            remedy = f"set: {{{reader.name}.rows: {region.filter}}}"
            drawing = draw(graph, [writer(graph, read[0]).name, reader.name])
            yield Problem("before-refill", law, reader.mark, (), remedy, drawing)


def _reader(graph: Graph, node: Node) -> Node:
    """Return the node that the user wrote behind an inserted one."""
    return node if node.call else _reader(graph, graph.readers(node.writes[0])[0])


def _one_leaves(graph: Graph, region: Region, inside: Sequence[Node]) -> Iterator[Problem]:
    """Check that one step marks the finished groups of a round, and that there is one where it streams."""
    leaving = [node for node in inside if node.leaves]
    if region.streams and not leaving:
        law = f"`{region.filter}` refills, and where generation streams a filter behind it does"
        remedy = f"set: {{{region.filter}.refill: false}}, add: {{whole: {{op: filter.all, refill: true}}}}, "
        remedy += "or set: {schedule.stream: null}"
        yield Problem("no-stream", law, graph.node(region.filter).mark, (), remedy)
    if len(leaving) > 1:
        first, second = (f"`{node.name}`" for node in leaving[:2])
        law = f"{first} and {second} both leave groups unfinished, and `{region.filter}` refills"
        remedy = f"replace: {{{leaving[1].name}: {{op: rollout, ...}}}}"
        if region.streams:  # which makes every rollout such a step
            remedy = "set: {schedule.stream: null}"
        yield Problem("two-partial", law, leaving[1].mark, (), remedy)


def _none_varies(graph: Graph, region: Region, inside: Sequence[Node]) -> Iterator[Problem]:
    """Check that no step of a round makes a number of rows that varies."""
    for node in inside:
        if node.call and node.op.declared.counts:
            law = f"`{region.filter}` refills, and `{node.name}` ({node.op.name}), which it repeats, makes a "
            law += "number of rows that varies: rounds count rows before they come"
            remedy = f"set: {{{region.filter}.refill: false}}, or refill by a filter before `{node.name}`"
            yield Problem("varying-refill", law, node.mark, (), remedy)


def _same_source(graph: Graph, filters: Sequence[Node]) -> Iterator[Problem]:
    """Check that the steps behind a source are repeated for one filter."""
    first: dict[str, Node] = {}
    for node in filters:
        source = graph.ancestors(node.domain)[-1].maker
        other = first.setdefault(source, node)
        if other is not node:
            law = f"`{other.name}` and `{node.name}` both refill from `{source}`"
            yield Problem("two-regions", law, node.mark, (), f"set: {{{other.name}.refill: false}}")
            return


def _same_lead(graph: Graph, region: Region, inside: Sequence[Node]) -> Iterator[Problem]:
    """Check that a region runs ahead of the updates as a whole, or not at all."""
    trained = {node.model for node in graph.nodes if node.updates}
    ahead = [node for node in inside if node.version is not None and node.version < 0]
    for node in inside:
        if ahead and node.model in trained and node not in ahead:
            law = f"`{region.filter}` refills, and what it repeats runs ahead of training with "
            law += f"`{ahead[0].name}` ({ahead[0].weights}); `{node.name}` scores by {node.weights}"
            remedy = f"set: {{{node.name}.rows: {region.filter}}}"
            yield Problem("region-ahead", law, node.mark, (), remedy)
            return


REGION_LAWS = (
    _source_given,
    _whole_groups,
    _read_outside,
    _one_leaves,
    _none_varies,
    _same_lead,
    _keeps_no_state,
)
