"""Laws of regions: what can be repeated in rounds until a filter with ``refill`` has kept enough rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlgraph.errors import Problem
from rlgraph.ir.actions import Kind
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.trace import draw, writer
from rlgraph.laws.streams import trained_models
from rlgraph.laws.views import RegionView


def same_source(graph: Graph) -> Iterator[Problem]:
    """Yield a filter that repeats the steps behind a source which are repeated for another filter already."""
    filters: dict[str, Node] = {}  # by their source
    for node in graph.nodes:
        if not node.refill:
            continue
        source = graph.ancestors(node.domain)[-1].maker
        rival = filters.setdefault(source, node)
        if rival is not node:
            law = f"`{rival.name}` and `{node.name}` both refill from `{source}`"
            yield Problem("two-regions", law, node.mark, (), f"set: {{{rival.name}.refill: false}}")
            return


def _source_can_be_asked(view: RegionView) -> Iterator[Problem]:
    """A source gives as many prompts as a round asks for."""
    source = view.graph.node(view.region.source)
    if source.op.source and isinstance(source.called.value("rows"), int):
        return
    batch = source.called.name_of("rows") or "batch"
    law = f"`{view.region.filter}` refills from `{source.name}` ({source.op.name}), which is asked for more "
    law += f"prompts by its attribute `{batch}`, a number"
    yield Problem("no-batch", law, source.mark, (), f"set: {{{source.name}.{batch}: 128}}")


def _groups_are_complete(view: RegionView) -> Iterator[Problem]:
    """A filter of groups keeps as many rows as some groups have."""
    region = view.region
    filtering = view.graph.node(region.filter)
    keeps_groups = filtering.op.declared.rows == "group"
    if not keeps_groups or region.rows % region.times == 0:
        return
    law = f"`{region.filter}` keeps whole groups of {region.times}; {region.rows} rows are none"
    rows = max(region.rows // region.times, 1) * region.times
    remedy = f"set: {{{region.filter}.refill.rows: {rows}}}"
    yield Problem("cut-groups", law, filtering.mark, (), remedy)


def _only_kept_rows_are_read(view: RegionView) -> Iterator[Problem]:
    """No rows but those that the filter keeps leave a region."""
    graph = view.graph
    names = {node.name for node in view.inside}
    written: set[str] = set()
    for node in view.inside:
        written.update(node.writes)
    for node in graph.nodes:
        if node.name in names or node.kind is Kind.COLLECT:
            continue
        columns = [column for column in node.reads if column in written]
        if not columns:
            continue
        reader = _user_node_behind(graph, node)
        law = f"`{reader.name}` reads `{columns[0]}` of all rows, and `{view.region.filter}` refills: "
        law += "only the rows that it keeps are collected"
        remedy = f"set: {{{reader.name}.rows: {view.region.filter}}}"
        drawing = draw(graph, [writer(graph, columns[0]).name, reader.name])
        yield Problem("before-refill", law, reader.mark, (), remedy, drawing)


def _user_node_behind(graph: Graph, node: Node) -> Node:
    """Return the node that the user wrote behind an inserted one, or the node itself."""
    while not node.call:
        node = graph.readers(node.writes[0])[0]
    return node


def _stream_has_rollout(view: RegionView) -> Iterator[Problem]:
    """A filter that refills from a stream is behind the rollout that streams."""
    if not view.region.streams:
        return
    if any(node.unfinished_columns for node in view.inside):
        return
    name = view.region.filter
    law = f"`{name}` refills, and where generation streams a filter behind it does"
    updates = [node.name for node in view.graph.in_order if node.trains]
    remedy = f"set: {{{name}.refill: false}}, add: {{whole: {{op: filter.all, refill: true}}}}, and let a "
    remedy += f"node behind it read its rows: set: {{{updates[-1]}.rows: whole}}; "
    remedy += "or set: {schedule.buffer: null}"
    yield Problem("no-stream", law, view.graph.node(name).mark, (), remedy)


def _one_step_leaves_groups(view: RegionView) -> Iterator[Problem]:
    """One step marks the finished groups of a round."""
    leaving = [node for node in view.inside if node.unfinished_columns]
    if len(leaving) < 2:
        return
    law = f"`{leaving[0].name}` and `{leaving[1].name}` both leave groups unfinished, "
    law += f"and `{view.region.filter}` refills"
    if view.region.streams:  # which makes every rollout such a step
        remedy = "set: {schedule.buffer: null}"
    else:
        remedy = f"replace: {{{leaving[1].name}: {{op: rollout, ...}}}}"
    yield Problem("two-partial", law, leaving[1].mark, (), remedy)


def _rows_do_not_vary(view: RegionView) -> Iterator[Problem]:
    """No step of a round makes a number of rows that varies."""
    for node in view.inside:
        if not node.call or not node.op.declared.counts:
            continue
        law = f"`{view.region.filter}` refills, and `{node.name}` ({node.op.name}), which it repeats, "
        law += "makes a number of rows that varies: rounds count rows before they come"
        remedy = f"set: {{{view.region.filter}.refill: false}}, or refill by a filter before `{node.name}`"
        yield Problem("varying-refill", law, node.mark, (), remedy)


def _runs_ahead_together(view: RegionView) -> Iterator[Problem]:
    """A region runs ahead of the updates with all of its nodes, or with none."""
    trained = trained_models(view.graph)
    ahead = []
    behind = []
    for node in view.inside:
        if (node.version or 0) < 0:
            ahead.append(node)
        elif node.model in trained:
            behind.append(node)
    if not ahead or not behind:
        return
    node = behind[0]
    law = f"`{view.region.filter}` refills, and what it repeats runs ahead of training with "
    law += f"`{ahead[0].name}` ({ahead[0].weights}); `{node.name}` scores by {node.weights}"
    remedy = f"set: {{{node.name}.rows: {view.region.filter}}}"
    yield Problem("region-ahead", law, node.mark, (), remedy)


def _keeps_no_state(view: RegionView) -> Iterator[Problem]:
    """No step of a round keeps a state, which a round would change before the iteration is over."""
    for node in view.inside:
        if not node.call or node.op.declared.state != "keeps":
            continue
        law = f"`{node.name}` keeps a state from iteration to iteration, "
        law += f"and `{view.region.filter}` repeats it in rounds"
        remedy = "what a filter with `refill` reads keeps no state; read one in it, as filter.difficulty does"
        yield Problem("state-in-rounds", law, node.mark, (), remedy)


REGION_LAWS: tuple[Callable[[RegionView], Iterator[Problem]], ...] = (
    _source_can_be_asked,
    _groups_are_complete,
    _only_kept_rows_are_read,
    _stream_has_rollout,
    _one_step_leaves_groups,
    _rows_do_not_vary,
    _runs_ahead_together,
    _keeps_no_state,
)
