"""Binds the schedule of a graph: how long a run is, what ends it, and what comes on the way and how often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlgraph.errors import Mark, nearest
from rlgraph.ir.graph import Graph, Node
from rlgraph.laws.streams import is_on_separate_pool, serving_trained
from rlgraph.ops.registry import find_function
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.settings import Best, Eval, Schedule, Stop
from rlgraph.syntax.source import OPEN, Tree
from rlgraph.syntax.validate import Binder

LENGTHS = ("iterations", "epochs")  # of a run, which has one of them
INTERVALS = ("save_every", "record_every")  # of the schedule, which an evaluation's `every` is like
FIFO = "fifo"
IN_ORDER = "in_order"
# settings of `schedule.buffer` that only some buffers have -> by what these are filled
SETTINGS_BY_FILLING = {
    "order": ("group", "surplus"),
    "too_old": ("group",),
    "in_flight": ("group",),
    "chunk": ("group",),
    "lend": ("group",),
}


def run_length(schedule: Schedule | None, nodes: Sequence[Node], tree: Tree, binder: Binder) -> Schedule:
    """Return a schedule with the source whose rows its epochs count; a run has iterations or epochs."""
    section = tree.get("schedule")
    schedule = schedule or Schedule()
    if section is None or not section.is_map:
        return schedule
    items = [section.items[name] for name in LENGTHS if name in section.items]
    mark = items[-1].key if items else section.key
    # null takes back what a parent says, as of a graph that counts epochs in place of iterations
    lengths = [item for item in items if item.value is not None]
    if len(lengths) > 1:
        law = "`schedule` has `iterations` and `epochs`"
        binder.problem("run-length", law, mark, remedy="set: {schedule.iterations: null}")
    elif not lengths:
        law = "`schedule` has no `iterations` and no `epochs`"
        binder.problem("run-length", law, mark, remedy="add `iterations: ...`, or `epochs: ...`")

    if schedule.stop:
        _stop_is_measured(schedule.stop, tree, binder)
    if schedule.best:
        _best_is_measured(schedule.best, tree, binder)

    schedule = _ordered(schedule, section, binder)
    intervals = {}
    for key in INTERVALS:
        path = ("schedule", key)
        intervals[key] = _interval(getattr(schedule, key), path, schedule, nodes, tree, binder)
    schedule = schedule.model_copy(update=intervals)
    if schedule.epochs is None:
        return schedule
    return _counted(schedule, nodes, mark, binder)


def evaluation_times(
    evaluation: Eval | None, schedule: Schedule, nodes: Sequence[Node], tree: Tree, binder: Binder
) -> dict[str, Any]:
    """Return when a graph evaluates, as its attributes ``eval_every`` and ``eval_before``."""
    if evaluation is None:
        return {}
    every = _interval(evaluation.every, ("eval", "every"), schedule, nodes, tree, binder)
    return {"eval_every": every, "eval_before": evaluation.before}


def _interval(
    every: int | Interval,
    path: tuple[str, str],
    schedule: Schedule,
    nodes: Sequence[Node],
    tree: Tree,
    binder: Binder,
) -> int | Interval:
    """Return an interval with the source whose rows its epochs count, checked against the schedule."""
    if isinstance(every, int):
        return every
    name = ".".join(path)
    mark = tree.at(path).mark
    for law, remedy in _unforeseen(every, schedule, nodes):
        binder.problem("interval", f"`{name}` is {every}, and {law}", mark, remedy=remedy)

    sources = _sources(nodes)
    counts_rows = bool(every.epochs)
    if not counts_rows or every.source in sources:
        return every
    if every.source:
        law = f"`{name}` counts the rows of `{every.source}`, which is not a source of the graph"
        binder.problem("interval", law, mark, sources, nearest(every.source, sources))
        return every
    if len(sources) == 1:
        return every.of(sources[0])
    listing = ", ".join(sources) or "none"
    law = f"`{name}` counts the rows of one source; the graph has {listing}"
    remedy = "give iterations, or a duration"
    if sources:
        remedy = f"say whose: {every} of {sources[0]}"
    binder.problem("interval", law, mark, (), remedy)
    return every


def _sources(nodes: Sequence[Node]) -> list[str]:
    names = []
    for node in nodes:
        if node.call and node.op.source:
            names.append(node.name)
    return names


def _unforeseen(every: Interval, schedule: Schedule, nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """Yield why an interval's end has to be foreseen and can't be, and what to do.

    Where generation runs whole iterations ahead, what comes between two iterations empties the pipeline,
    and rows behind it are drawn by newer weights than else. Where that is may depend on nothing but the graph
    and its data.
    """
    if not schedule.ahead:
        return
    law = "generation runs ahead of training (`schedule.buffer`): where the pipeline is emptied, which "
    law += "changes the weights, would depend on "
    instead = "or let generation stream: schedule.buffer.by=group"
    if every.seconds:
        yield f"{law}the clock", f"give iterations or epochs; {instead}"
    elif any(node.refill for node in nodes):
        yield f"{law}how many rows a filter with `refill` takes", f"give iterations; {instead}"


def _ordered(schedule: Schedule, section: Tree, binder: Binder) -> Schedule:
    """Return a schedule whose buffer, if any, has found the user's function that orders its groups."""
    buffer = schedule.buffer
    if buffer is None or buffer.order in (FIFO, IN_ORDER, OPEN):
        return schedule
    mark = section.items["buffer"].items["order"].mark
    function = binder.attempt(find_function, buffer.order, "policy", mark)
    if function is None:
        return schedule
    return schedule.model_copy(update={"buffer": buffer.model_copy(update={"order": function})})


def with_buffer(graph: Graph, tree: Tree, binder: Binder) -> Graph:
    """Return a graph whose buffer, if any, says what waits in it."""
    buffer = graph.schedule.buffer
    if buffer is None:
        return graph
    place = tree.at(("schedule", "buffer"))
    by = buffer.by or _filled_by(graph)
    if by == "surplus" and not _refills(graph):
        law = "`schedule.buffer` is by surplus, what a filter kept and did not need, and no filter refills"
        remedy = "set: {schedule.buffer: null}, or let one refill: set: {FILTER.refill: true}"
        binder.problem("no-surplus", law, place.key, (), remedy)
    _settings_fit(place, by, binder)
    if buffer.order == IN_ORDER and by == "surplus":
        law = "`schedule.buffer.order` is in_order, which is for groups that stream; these are surplus"
        mark = place.items["order"].mark
        binder.problem("buffer-setting", law, mark, (), "set: {schedule.buffer.order: fifo}")
    settled = buffer.model_copy(update={"by": by})
    return replace(graph, schedule=graph.schedule.model_copy(update={"buffer": settled}))


def _settings_fit(place: Tree, by: str, binder: Binder) -> None:
    """Check that a buffer has only settings that are read for what waits in it."""
    for key, item in place.items.items():
        accepting = SETTINGS_BY_FILLING.get(key, (by,))
        if item.value is None or by in accepting:
            continue
        law = f"`schedule.buffer.{key}` is for a buffer by {' or '.join(accepting)}, and this one is by {by}"
        remedy = f"remove: [schedule.buffer.{key}]"
        binder.problem("buffer-setting", law, item.key, (), remedy)


def _refills(graph: Graph) -> bool:
    return any(node.refill for node in graph.nodes)


def _filled_by(graph: Graph) -> str:
    """Return what waits in a buffer that does not say so."""
    can_stream = any(is_on_separate_pool(graph, node) for node in serving_trained(graph))
    if _refills(graph) and not can_stream:
        return "surplus"
    return "group"  # which is refused, where generation lacks something for it


def _stop_is_measured(stop: Stop, tree: Tree, binder: Binder) -> None:
    """Check that the metric of an early stop has one bound and, of an evaluation, that it is reported."""
    place = tree.at(("schedule", "stop"))
    has_least = stop.at_least is not None
    has_most = stop.at_most is not None
    if has_least == has_most:
        bounds = "two bounds" if has_least else "no bound"
        law = f"`schedule.stop` has {bounds} for `{stop.metric}`"
        remedy = "give at_least, as of an accuracy, or at_most, as of a loss"
        binder.problem("stop-bound", law, place.key, ("at_least", "at_most"), remedy)
    if stop.metric.startswith("eval/"):
        _is_reported(stop.metric, "`schedule.stop` waits for", place, tree, binder)


def _best_is_measured(best: Best, tree: Tree, binder: Binder) -> None:
    """Check that the metric by which checkpoints are best is one of evaluations, and reported."""
    if OPEN not in (best.metric, best.mode):
        _is_reported(best.metric, "`schedule.best` goes by", tree.at(("schedule", "best")), tree, binder)


def _is_reported(metric: str, reads: str, place: Tree, tree: Tree, binder: Binder) -> None:
    """Check that a metric of evaluations, or a part of one, is reported; ``reads`` begins the law."""
    known = []
    if tree.get("eval"):
        known = [f"eval/{name}" for name in tree.at(("eval", "report")).items]
    for reported in known:
        is_part = metric.startswith(f"{reported}/")  # as of one data set: eval/accuracy/math
        if is_part or metric == reported:
            return
    law = f"{reads} `{metric}`, which no evaluation reports"
    remedy = nearest(metric, known) or _report_of(metric, place, known)
    binder.problem("no-metric", law, place.at(("metric",)).mark, known, remedy)


def _report_of(metric: str, place: Tree, known: Sequence[str]) -> str:
    """Return the edit with which evaluations report a metric, or with which its reader takes one of theirs.

    ``known`` are the metrics of evaluations. The mean of the column ``rewards`` is an example of a report.
    """
    section = "best" if "mode" in place.items else "stop"
    setting = f"schedule.{section}.metric"
    if not metric.startswith("eval/"):
        if known:
            return f"set: {{{setting}: {known[0]}}}"
        return f"add: {{eval: {{report: {{accuracy: rewards}}}}}}, and set: {{{setting}: eval/accuracy}}"
    name = metric.removeprefix("eval/")
    if known:
        return f"report it, for example by set: {{eval.report.{name}: rewards}}"
    return f"report it, for example by add: {{eval: {{report: {{{name}: rewards}}}}}}"


def _counted(schedule: Schedule, nodes: Sequence[Node], mark: Mark | None, binder: Binder) -> Schedule:
    """Return a schedule whose epochs name the source whose rows they count."""
    sources = _sources(nodes)
    epochs = schedule.epochs
    counted = epochs if isinstance(epochs, dict) else dict.fromkeys(sources, epochs)
    are_sources = counted.keys() <= {*sources}
    if len(counted) != 1 or not are_sources:
        listing = ", ".join(sources) or "none"
        law = f"`schedule.epochs` counts the rows of one source; the graph has {listing}"
        remedy = "give schedule.iterations"
        if sources:
            remedy = f"set: {{schedule.epochs: {{{sources[0]}: 3}}}}"
        binder.problem("run-length", law, mark, remedy=remedy)
    return schedule.model_copy(update={"epochs": counted})
