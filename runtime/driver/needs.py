"""A step's calls are known once reports, references of columns or filled regions are here.

    step                  needs
    rollout               the column `prompts`; the report of `prompts`, which says how many rows there are
    advantages            its columns; the report of `rollout` too, where a balanced layout goes by lengths
    collect informative   as many rows as an iteration has, of however many rounds

The driver counts these down, and makes a step's calls when none is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from rlgraph.ir.actions import Collect, Merge, MoveEngine, Repartition, Repeat, RunOp, Select, Sync
from rlgraph.ir.intervals import due
from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.iteration import Execution, filled
from rlgraph.runtime.driver.rows import Awaited

Need = tuple[Execution, Awaited]  # an event of an execution: of this iteration, or of one before


def needs_of(execution: Execution, step: Step) -> set[Need]:
    """Return what the calls of a step depend on; of a collect, that its region has enough rows."""
    if isinstance(step.action, Collect):
        return {(execution, filled(step.region))}
    events = {*step.reads, *_row_events(execution, step), *execution.comes_first(step)}
    needs: set[Need] = {(execution, event) for event in events}
    if not step.inserted:
        needs |= _position_needs(execution, step.node)
        needs |= _state_needs(execution, step)
        needs |= _controller_needs(execution, step)
    return needs


def _row_events(execution: Execution, step: Step) -> Iterable[Awaited]:
    """Return what says which rows a step has on each device."""
    match step.action:
        case RunOp():
            return _read_events(execution, step) if step.reads else ()
        case Repeat():
            return _repeat_events(execution, step)
        case Select():
            selected = execution.columns[step.writes[0]].domain
            return _read_events(execution, step) | execution.rows.known_by(selected)
        case Merge():
            return _merge_events(execution, step)
        case Repartition():
            return _repartition_events(execution, step)
        case Collect() | Sync() | MoveEngine():
            return ()
        case _:
            assert_never(step.action)


def _read_events(execution: Execution, step: Step) -> set[Awaited]:
    """Return what says which rows of its first column a step has on each device."""
    return execution.rows.known_by(execution.columns[step.reads[0]].domain, step.layout)


def _repeat_events(execution: Execution, step: Step) -> set[Awaited]:
    """Return what says how often each row is repeated; nothing where the graph does."""
    copies = execution.columns[step.writes[0]].domain
    if not execution.rows.is_reported(copies):
        return set()
    return execution.rows.known_by(copies) | _read_events(execution, step)


def _repartition_events(execution: Execution, step: Step) -> set[Awaited]:
    """Return what says where the rows lie that a step brings, and where they are to lie."""
    rows = execution.rows
    events = set[Awaited]()
    for name in step.reads:
        column = execution.columns[name]
        events |= rows.known_by(column.domain, column.layout)
        events |= rows.known_by(column.domain, step.layout)
    return events


def _merge_events(execution: Execution, step: Step) -> set[Awaited]:
    rows = execution.rows
    columns = execution.columns
    events = rows.known_by(columns[step.writes[0]].domain, step.layout)
    for name in step.reads:
        events |= rows.known_by(columns[name].domain, columns[name].layout)
    return events


def _previous(execution: Execution) -> Iterator[Execution]:
    """Yield the iterations in flight before one."""
    while execution.previous is not None:
        execution = execution.previous
        yield execution


def _position_needs(execution: Execution, node: str) -> set[Need]:
    """Return the events that tell how many rows a source gave before."""
    needs = set[Need]()
    for previous in _previous(execution):
        needs |= {(previous, event) for event in previous.rows.source_events(node)}
    return needs


def _controller_needs(execution: Execution, step: Step) -> set[Need]:
    """Return what the adaptive attributes of a step follow: see ``adaptive.py``."""
    needs = set[Need]()
    if not execution.plan.functions[execution.phase][step.node].controllers:
        return needs
    domain = execution.columns[step.reads[0]].domain
    for previous in _previous(execution):
        if not due(step.when, previous.entry.iteration + 1):
            continue
        if step.region:
            needs.add((previous, filled(step.region)))
        else:
            needs.add((previous, step.id))
            needs |= {(previous, event) for event in previous.rows.known_by(domain)}
    return needs


def _state_needs(execution: Execution, step: Step) -> set[Need]:
    """Return the events in iterations before by which the state that a step has is known."""
    node = execution.plan.functions[execution.phase][step.node].state
    needs = set[Need]()
    if not node:
        return needs
    for previous in _previous(execution):
        needs |= {(previous, keeper.id) for keeper in previous.steps if keeper.node == node}
    return needs
