"""The calls that a step makes on workers, with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlgraph.errors import RunError
from rlgraph.ir.actions import MOVES, Kind, complete
from rlgraph.ir.domains import ancestors
from rlgraph.ir.plan import Step
from rlgraph.ops.column_types import is_made_of
from rlgraph.runtime.driver.adaptive import adapted
from rlgraph.runtime.driver.iteration import Execution
from rlgraph.runtime.driver.row_buffer import Arguments, end_to_end, gathering
from rlgraph.runtime.driver.states import state
from rlgraph.runtime.messages.report import Scope
from rlgraph.runtime.messages.tasks import Place


@dataclass(frozen=True)
class WorkerCall:
    """A call of one worker's method; references to the columns that it reads follow ``args``."""

    place: Place
    method: str
    args: tuple[Any, ...]
    refs: tuple[Any, ...] = ()
    unfinished_columns: int = 0  # that it returns after those that its step writes


def calls_of(execution: Execution, step: Step) -> list[WorkerCall]:
    """Return the calls that a step makes on each device, once what it needs has happened: see needs.py."""
    return HANDLERS[step.kind](execution, step)


def _each(step: Step, method: str, inputs: Callable[[int], Arguments]) -> list[WorkerCall]:
    return [WorkerCall((step.pool, device), method, *inputs(device)) for device in step.devices]


def _run(execution: Execution, step: Step) -> list[WorkerCall]:
    domain = ""  # of the rows that the step reads; a source reads none
    rows = None
    total_rows = 0
    kind = ""
    if step.reads:
        domain = execution.columns[step.reads[0]].domain
        rows = execution.rows.layout(domain, step.layout, step.pool)
        total_rows = execution.rows.count(domain)
        kind = execution.domains[domain].kind
    requested = None
    may_end_early = False
    unfinished_columns = 0
    if execution.inputs:
        requested = execution.inputs.requested
        may_end_early = execution.inputs.may_end_early and bool(step.unfinished)
        unfinished_columns = step.unfinished
    scope = Scope(
        phase=execution.phase,
        iteration=execution.entry.iteration,
        total_rows=total_rows,
        position=execution.position(step.node),
        versions=execution.versions(step),
        adapted=adapted(execution, step),
        state=state(execution, execution.plan.functions[execution.phase][step.node].state),
        requested_rows=None if domain else requested,
        resumes=requested is not None,
        may_end_early=may_end_early,
    )
    samples = None
    total_samples = 0
    if is_made_of(kind, "samples"):
        samples, total_samples = execution.rows.samples(domain)

    def inputs(device: int) -> Arguments:
        device_rows: Any = ()
        numbers: Any = ()
        if rows is not None:
            device_rows = rows[device]
            numbers = execution.numbers(domain)[device_rows]
        resumed_rows, resumed_refs = execution.resumed(step, device_rows)
        refs = [execution.reference(column, device) for column in step.reads]
        device_scope = replace(scope, rows=numbers, resumed=resumed_rows)
        if samples is not None:
            device_scope = replace(device_scope, samples=samples[device_rows], total_samples=total_samples)
        return (step.node, device_scope), (*refs, *resumed_refs)

    return [replace(call, unfinished_columns=unfinished_columns) for call in _each(step, "run", inputs)]


def _sync(execution: Execution, step: Step) -> list[WorkerCall]:
    ((model, version),) = execution.versions(step).items()
    if not step.source:
        return _each(step, "engine", lambda _: (("sync", model, version), ()))
    sends = [WorkerCall(place, "engine", ("send", model, version)) for place in execution.places(step.source)]
    return [*sends, *_each(step, "engine", lambda _: (("receive", model, version), ()))]


def _transition(execution: Execution, step: Step) -> list[WorkerCall]:
    return _each(step, "engine", lambda _: (("move", step.action), ()))


def _select(execution: Execution, step: Step) -> list[WorkerCall]:
    (column,) = step.reads
    (copy,) = step.writes
    layout = execution.rows.layout(execution.columns[column].domain, step.layout, step.pool)
    stayed = execution.rows.origin(execution.columns[copy].domain)
    places = [np.flatnonzero(np.isin(rows, stayed)) for rows in layout]
    return _each(step, "select", lambda device: ((places[device],), (execution.reference(column, device),)))


def _repeat(execution: Execution, step: Step) -> list[WorkerCall]:
    (column,) = step.reads
    (copy,) = step.writes
    domain = execution.domains[execution.columns[copy].domain]
    times = domain.times
    finished = execution.rows.finished(domain.name)
    rises = domain in ancestors(execution.domains, execution.columns[column].domain)
    if rises:  # it has as many rows: it is of rows made of these, one for each
        return _each(step, "repeat", lambda device: ((1,), (execution.reference(column, device),)))
    if finished is None and not domain.most:
        return _each(step, "repeat", lambda device: ((times,), (execution.reference(column, device),)))
    layout = execution.rows.layout(execution.columns[column].domain, step.layout, step.pool)
    if domain.most:
        counts = execution.rows.counts(domain.name)
        places = [np.arange(len(rows)).repeat(counts[rows]) for rows in layout]
    else:
        places = [np.flatnonzero(np.isin(rows, finished)).repeat(times) for rows in layout]
    return _each(step, "select", lambda device: ((places[device],), (execution.reference(column, device),)))


def _repartition(execution: Execution, step: Step) -> list[WorkerCall]:
    """Return calls by which devices gather their rows of the new layout from the chunks of any pool."""
    domains = [execution.columns[column].domain for column in step.reads]
    targets = [execution.rows.layout(domain, step.layout, step.pool) for domain in domains]
    pairs = [*zip(map(execution.selection, step.reads), targets, strict=True)]
    return _each(
        step, "repartition", lambda device: gathering([c.take(target[device]) for c, target in pairs])
    )


def _merge(execution: Execution, step: Step) -> list[WorkerCall]:
    """Return calls by which devices gather their rows of a column from the chunks that have some each.

    Raises:
        RunError: no chunk has one of the rows.
    """
    columns = execution.columns
    domain = execution.columns[step.writes[0]].domain
    rows = np.concatenate([execution.rows.within(columns[name].domain, domain) for name in step.reads])
    missing = np.setdiff1d(np.arange(execution.rows.count(domain)), rows)
    if len(missing):
        law = f"row {missing[0]} of {domain} has no `{step.writes[0]}`: {step.because}, and none has this row"
        raise RunError(f"{law}\n  let each of {', '.join(step.reads)} have all rows of its route")
    merged = end_to_end([execution.selection(name) for name in step.reads]).take(np.argsort(rows))
    layout = execution.rows.layout(domain, step.layout, step.pool)
    return _each(step, "repartition", lambda device: gathering([merged.take(layout[device])]))


def _collect(execution: Execution, step: Step) -> list[WorkerCall]:
    """Return calls by which devices gather their share of a region's rows from the rounds' chunks."""
    domain = execution.columns[step.writes[0]].domain
    used = execution.streams[step.region].used
    assert used
    execution.rows.collected[domain] = replace(used, columns={})
    layout = execution.rows.layout(domain, step.layout, step.pool)
    return _each(step, "repartition", lambda device: used.take(layout[device]).gathering(step.reads))


HANDLERS: Mapping[Kind, Callable[[Execution, Step], list[WorkerCall]]] = complete(
    {
        Kind.RUN: _run,
        Kind.SYNC: _sync,
        Kind.LEND: _sync,
        Kind.REPEAT: _repeat,
        Kind.SELECT: _select,
        Kind.COLLECT: _collect,
        Kind.MERGE: _merge,
        Kind.REPARTITION: _repartition,
        **dict.fromkeys(MOVES, _transition),
    }
)
