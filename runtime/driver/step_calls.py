"""The calls that a step makes on workers, with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlgraph.ir.plan import Step
from rlgraph.ir.steps import MOVES, Kind, complete
from rlgraph.runtime.driver.adaptive import adapted
from rlgraph.runtime.driver.iteration import Walk
from rlgraph.runtime.driver.row_buffer import Given, gathering
from rlgraph.runtime.messages.report import Scope
from rlgraph.runtime.messages.tasks import Place


@dataclass(frozen=True)
class WorkerCall:
    """A call of one worker's method; the parts of columns that it reads follow ``args``."""

    place: Place
    method: str
    args: tuple[Any, ...]
    parts: tuple[Any, ...] = ()
    leaves: int = 0  # columns that it gives beside those that its step writes


def calls_of(walk: Walk, step: Step) -> list[WorkerCall]:
    """Return what a step is on each of its devices, once all that it needs has happened: see ``needs.py``."""
    return HANDLERS[step.kind](walk, step)


def _each(step: Step, method: str, inputs: Callable[[int], Given]) -> list[WorkerCall]:
    return [WorkerCall((step.pool, device), method, *inputs(device)) for device in step.devices]


def _run(walk: Walk, step: Step) -> list[WorkerCall]:
    domain = walk.columns[step.reads[0]].domain if step.reads else ""
    rows = walk.rows.layout(domain, step.layout, step.pool) if domain else None
    total = walk.rows.count(domain) if domain else 0
    position, versions, now = walk.position(step.node), walk.versions(step), adapted(walk, step)

    def inputs(device: int) -> Given:
        held = () if rows is None else rows[device]
        begun, left = walk.taken_up(step, held)
        scope = Scope(
            phase=walk.phase,
            iteration=walk.entry.iteration,
            rows=() if rows is None else walk.numbers(domain)[held],
            total_rows=total,
            position=position,
            versions=versions,
            adapted=now,
            asks=walk.asks if rows is None else None,
            resumes=walk.asks is not None,
            begun=begun,
        )
        parts = [walk.part(column, device) for column in step.reads]
        return (step.node, scope), (*parts, *left)

    leaves = 0 if walk.asks is None else step.leaves
    return [replace(call, leaves=leaves) for call in _each(step, "run", inputs)]


def _sync(walk: Walk, step: Step) -> list[WorkerCall]:
    ((model, version),) = walk.versions(step).items()
    if not step.source:
        return _each(step, "engine", lambda _: (("sync", model, version), ()))
    sent = [WorkerCall(place, "engine", ("send", model, version)) for place in walk.places(step.source)]
    return [*sent, *_each(step, "engine", lambda _: (("receive", model, version), ()))]


def _transition(walk: Walk, step: Step) -> list[WorkerCall]:
    model = next(iter(step.models))
    return _each(step, "engine", lambda _: (("move", step.kind, model, step.parts), ()))


def _select(walk: Walk, step: Step) -> list[WorkerCall]:
    (column,), (copy,) = step.reads, step.writes
    held = walk.rows.layout(walk.columns[column].domain, step.layout, step.pool)
    kept = walk.rows.origin(walk.columns[copy].domain)
    places = [np.flatnonzero(np.isin(rows, kept)) for rows in held]
    return _each(step, "select", lambda device: ((places[device],), (walk.part(column, device),)))


def _repeat(walk: Walk, step: Step) -> list[WorkerCall]:
    (column,), (copy,) = step.reads, step.writes
    domain = walk.domains[walk.columns[copy].domain]
    times, whole = domain.times, walk.rows.whole(domain.name)
    if whole is None:
        return _each(step, "repeat", lambda device: ((times,), (walk.part(column, device),)))
    held = walk.rows.layout(walk.columns[column].domain, step.layout, step.pool)
    places = [np.flatnonzero(np.isin(rows, whole)).repeat(times) for rows in held]
    return _each(step, "select", lambda device: ((places[device],), (walk.part(column, device),)))


def _repartition(walk: Walk, step: Step) -> list[WorkerCall]:
    """Return calls by which devices gather their rows of the new layout from the parts of any pool."""
    target = walk.rows.layout(walk.columns[step.reads[0]].domain, step.layout, step.pool)
    columns = [walk.selection(column) for column in step.reads]
    return _each(step, "repartition", lambda at: gathering([c.take(target[at]) for c in columns]))


def _collect(walk: Walk, step: Step) -> list[WorkerCall]:
    """Return calls by which devices gather their share of a region's rows from the rounds' parts."""
    stream, domain = walk.streams[step.region], walk.columns[step.writes[0]].domain
    used = stream.used
    assert used
    walk.rows.collected[domain] = replace(used, columns={})
    held = walk.rows.layout(domain, step.layout, step.pool)
    return _each(step, "repartition", lambda at: used.take(held[at]).gathering(step.reads))


HANDLERS: Mapping[Kind, Callable[[Walk, Step], list[WorkerCall]]] = complete(
    {
        Kind.RUN: _run,
        Kind.SYNC: _sync,
        Kind.REPEAT: _repeat,
        Kind.SELECT: _select,
        Kind.COLLECT: _collect,
        Kind.REPARTITION: _repartition,
        **dict.fromkeys(MOVES, _transition),
    }
)
