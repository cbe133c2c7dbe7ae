"""Laws of the rows that nodes see: how many there are, of what, and in which iterations they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from rlgraph.errors import Problem
from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.intervals import COUNTED, Cadences, cycle, due, settled, within, words
from rlgraph.ir.schedules import ValueSchedule
from rlgraph.ir.trace import draw, refusal, sampler
from rlgraph.laws.views import CadenceView, NodeView


def _row_for_each_minibatch(view: NodeView) -> Iterator[Problem]:
    """An update has rows for each of its mini-batches."""
    graph, node = view.graph, view.node
    if not node.updates or not graph.ancestors(node.domain):
        return
    lines = graph.origins(node.domain)
    rows = _known_rows(graph, lines)
    if rows is None:
        return
    minibatches = node.called.value("minibatches", 1)
    if minibatches <= rows:
        return
    law = f"node `{node.name}` ({node.op.name}) makes {minibatches:,} mini-batches of {rows:,} rows"
    remedy = f"set: {{{node.name}.{node.called.name_of('minibatches')}: {rows}}}, or fewer"
    source = lines[0][-1].maker
    yield refusal("few-rows", law, graph, node, [source], remedy)


def _known_rows(graph: Graph, lines: Sequence[Sequence[GraphDomain]]) -> int | None:
    """Return how many rows come of some sources, each a line of domains that ends at it; None: it is open."""
    rows = 0
    for line in lines:
        batch = graph.node(line[-1].maker).called.value("rows")
        if not isinstance(batch, int):
            return None
        rows += batch * prod(domain.times for domain in line)
    return rows


def _one_context(view: NodeView) -> Iterator[Problem]:
    """A model reads one context at a time, though a sample may be several."""
    graph, node = view.graph, view.node
    if not node.call or node.op.engine != "train":
        return
    unfiltered = unfiltered_domains(graph, node)
    if not unfiltered:
        return
    maker = graph.node(unfiltered[0].maker)
    if not maker.call or not maker.called.value("contexts", False):
        return
    law = f"node `{node.name}` ({node.op.name}) reads whole samples of `{maker.name}`, whose policy "
    law += "forgets: it never saw all of a sample's tokens in one context"
    remedy = ""
    if not _cuts_contexts(graph):
        remedy += "add: {segments: {op: segment.contexts, most: 4}}, and "
    remedy += f"set: {{{node.name}.in: {{tokens: segment_tokens, loss_mask: segment_mask}}}}, or "
    remedy += f"set: {{{maker.name}.{maker.called.name_of('contexts')}: false}}"
    yield refusal("several-contexts", law, graph, node, [maker.name], remedy)


def _cuts_contexts(graph: Graph) -> bool:
    """Return whether the user's graph cuts samples into contexts, if only for nobody."""
    nodes = (*graph.nodes, *graph.dropped)
    return any(node.call and node.op.name == "segment.contexts" for node in nodes)


def unfiltered_domains(graph: Graph, node: Node) -> list[GraphDomain]:
    """Return the domains that a node's rows descend from, its own first, without those that filters make."""
    return [domain for domain in graph.ancestors(node.domain) if not domain.filtered]


def _groups_are_not_held(view: NodeView) -> Iterator[Problem]:
    """Rows that a node holds are given one by one: nothing compares those of a prompt."""
    graph, node = view.graph, view.node
    if not node.call or not compares_groups(node):
        return
    for line in graph.origins(node.domain):
        if not line or not line[-1].held:
            continue
        holder = graph.node(line[-1].maker)
        law = f"node `{node.name}` ({node.op.name}) compares the samples of a prompt; `{holder.name}` holds "
        law += "single rows, and gives some of them"
        remedy = f"let it compare them when they come: set: {{{node.name}.rows: {holder.rows[0]}}}; "
        remedy += "what it writes is held"
        yield refusal("held-groups", law, graph, node, [holder.name], remedy)
        return


def compares_groups(node: Node) -> bool:
    """Return whether a node of the user compares the samples of a prompt."""
    return node.op.declared.rows == "group" or "groups" in node.op.declared.assumes


ROW_LAWS: tuple[Callable[[NodeView], Iterator[Problem]], ...] = (
    _row_for_each_minibatch,
    _one_context,
    _groups_are_not_held,
)


def cut_groups(graph: Graph) -> Iterator[str]:
    """Yield notes of filters of single rows that may leave a part of a group to a node that compares it."""
    for node in graph.nodes:
        if not node.call or node.op.declared.rows != "group":
            continue
        names = []
        for maker in _filters_before(graph, node):
            if maker.op.declared.rows == "each":
                names.append(f"`{maker.name}`")
        if names:
            yield f"{', '.join(names)} may cut groups: `{node.name}` compares what is left of them"


def _filters_before(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the filters that a node's rows have passed since others were made of them, the last first."""
    for domain in graph.ancestors(node.domain):
        if not domain.filtered:
            return
        yield graph.node(domain.maker)


def _same_temperature(view: NodeView) -> Iterator[Problem]:
    """Samples are scored at the temperature at which they were drawn, and at 0 nothing is scored."""
    graph, node = view.graph, view.node
    rollout = sampler(graph, node.domain)
    if rollout is None or not scores_at_temperature(node):
        return
    sampled = temperature(rollout)
    if sampled is None:
        return
    scored = temperature(node)
    if scored is not None and scored != sampled:
        law = f"node `{node.name}` scores at temperature {scored}; `{rollout.name}` sampled at {sampled}"
        remedy = f"leave out {node.name}.temperature: it is the rollout's then"
        yield refusal("temperature", law, graph, node, [rollout.name], remedy)
    if isinstance(sampled, ValueSchedule) and _reaches_zero(sampled):
        law = f"node `{node.name}` scores what `{rollout.name}` samples at temperature {sampled}: "
        law += "at 0 there is no distribution to score by"
        remedy = f"let {rollout.name}.temperature stay above 0"
        yield Problem("temperature", law, node.mark, (), remedy)


def _reaches_zero(schedule: ValueSchedule) -> bool:
    return any(value == 0 for _, value in schedule.points)


def scores_at_temperature(node: Node) -> bool:
    """Return whether a node of a train engine has a temperature."""
    if node.call is None or node.op.engine != "train":
        return False
    return node.call.name_of("temperature") != ""


def temperature(node: Node) -> float | ValueSchedule | None:
    """Return the temperature of a node; None where it is open, or 0: greedy has no distribution."""
    course = node.called.course("temperature")
    if isinstance(course, ValueSchedule):
        return course
    return node.called.value("temperature") or None


TEMPERATURE_LAWS: tuple[Callable[[NodeView], Iterator[Problem]], ...] = (_same_temperature,)


def holds_rows(node: Node) -> bool:
    """Return whether a node keeps rows of earlier iterations, and gives some of them."""
    return node.call is not None and node.op.declared.holds


def _rows_come_when_read(view: CadenceView) -> Iterator[Problem]:
    """A node runs in no iteration in which something that it reads is not written."""
    graph, available = view.graph, view.available
    if not any(available.values()):
        return
    for node in graph.nodes:
        if holds_rows(node):
            continue
        runs = available[node.name] if node.writes else node.when
        for column in node.reads:
            writer = graph.writers[column]
            if holds_rows(writer):
                continue
            if not within(runs, available[writer.name]):
                yield _misses_rows(view, node, writer, runs)
                break


def _misses_rows(view: CadenceView, node: Node, writer: Node, runs: Cadences) -> Problem:
    graph, available = view.graph, view.available[writer.name]
    origin = _origin_of(view, available)
    law = f"node `{node.name}` runs {_iterations_text(runs)}; what it reads of "
    law += f"`{origin.name}` comes {words(available)}"
    cadence = available[0]
    remedy = ""
    # where only these rows train, iterations without them would have nothing to run
    has_other_updates = any(other.updates and other is not node for other in graph.nodes)
    if has_other_updates:
        remedy += f"set: {{{node.name}.every: {cadence.every}, {node.name}.from: {cadence.first}}}; or "
    maker = graph.domains[str(writer.domain)].maker
    replay = f"{{op: replay, rows: {maker}, fresh: true, capacity: 1024, staleness: {cadence.every - 1}}}"
    settings = f"{node.name}.rows: kept"
    if cadence.first > 1:
        settings += f", {origin.name}.from: 1"
    remedy += f"let rows last: add: {{kept: {replay}}}, and set: {{{settings}}}"
    mark = origin.edited or origin.mark
    return Problem("misses-rows", law, mark, (), remedy, draw(graph, [origin.name, node.name]))


def _iterations_text(cadences: Cadences) -> str:
    return words(cadences) or "in every iteration"


def _origin_of(view: CadenceView, available: Cadences) -> Node:
    """Return the node with a cadence of its own by which rows come in these iterations."""
    for node in view.graph.in_order:
        if node.writes and node.when and view.available[node.name] == available:
            return node
    raise AssertionError("rows come in some iterations only where a node that writes has a cadence")


def _held_rows_last(view: CadenceView) -> Iterator[Problem]:
    """A node runs in no iteration in which what holds its rows has none."""
    for node in view.graph.nodes:
        if not node.call or node.writes:
            continue
        rows = _held_rows(view.graph, node)
        if rows is None:
            continue
        empty = _iteration_without_rows(node.when, view.available[rows.maker], rows.ages)
        if empty is not None:
            yield _no_rows_held(view, node, rows, empty)


def _held_rows(graph: Graph, node: Node) -> GraphDomain | None:
    """Return the rows of earlier iterations that a node sees; None where it sees others, if only besides."""
    lines = graph.origins(node.domain)
    for line in lines:
        if not line or not line[-1].held:
            return None
    if not lines:
        return None
    return lines[0][-1]


def _no_rows_held(view: CadenceView, node: Node, rows: GraphDomain, iteration: int) -> Problem:
    graph, available = view.graph, view.available[rows.maker]
    holder = graph.node(rows.maker)
    youngest, oldest = rows.ages
    law = f"in iteration {iteration} `{holder.name}` has no rows for `{node.name}`: they come "
    law += f"{_iterations_text(available)}, and are given when they are {youngest} to {oldest} "
    law += "iterations old"
    settings = []
    if youngest:
        settings.append(f"{holder.name}.{holder.called.name_of('fresh')}: true")
    longest_gap = max(oldest, cycle([available]) - 1)
    if longest_gap > oldest:
        settings.append(f"{holder.name}.{holder.called.name_of('oldest')}: {longest_gap}")
    if _iteration_without_rows(node.when, available, (0, longest_gap)):
        settings.append(f"{_first_rare_writer(graph, node).name}.from: 1")
    remedy = f"set: {{{', '.join(settings)}}}"
    return Problem("no-rows-held", law, holder.edited or holder.mark, (), remedy)


def _first_rare_writer(graph: Graph, default: Node) -> Node:
    """Return the first node that writes, and in some iterations only; the default where there is none."""
    for node in graph.in_order:
        if node.writes and node.when:
            return node
    return default


def _iteration_without_rows(runs: Cadences, available: Cadences, ages: tuple[int, int]) -> int | None:
    """Return the first iteration in which a node runs, and no rows of these ages have come."""
    youngest, oldest = ages
    end = min(settled([runs, available]) + cycle([runs, available]) + oldest, COUNTED)
    has_come = [False]  # nothing comes before iteration 1
    for iteration in range(1, end + 1):
        has_come.append(due(available, iteration))
    for iteration in range(1, end + 1):
        if not due(runs, iteration):
            continue
        oldest_usable = max(iteration - oldest, 1)
        youngest_usable = iteration - youngest
        if not any(has_come[oldest_usable : youngest_usable + 1]):
            return iteration
    return None


CADENCE_LAWS: tuple[Callable[[CadenceView], Iterator[Problem]], ...] = (
    _rows_come_when_read,
    _held_rows_last,
)


def no_idle_iteration(graph: Graph) -> Iterator[Problem]:
    """Yield the first iteration in which nothing would run."""
    roots = [node for node in graph.nodes if _is_root(node)]
    when = [node.when for node in roots]
    if not roots or not all(when):
        return
    end = min(settled(when) + cycle(when), COUNTED)
    for iteration in range(1, end):
        if any(due(cadences, iteration) for cadences in when):
            continue
        cadences = ", ".join(f"`{node.name}` {words(node.when)}" for node in roots)
        law = f"in iteration {iteration} nothing would run: {cadences}"
        name = roots[0].name
        remedy = f"leave out {name}.every and {name}.from, or let another update run then"
        yield Problem("idle-iteration", law, roots[0].mark, (), remedy)
        return


def _is_root(node: Node) -> bool:
    """Return whether all that runs does so for this node, as for an update, or for another such one."""
    if node.inserted or node.joins:
        return False
    return not node.writes
