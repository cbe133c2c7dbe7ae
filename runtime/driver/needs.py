"""A step's calls are known once reports, references of columns or filled regions are here.

    step                  needs
    rollout               the column `prompts`; the report of `prompts`, which says how many rows there are
    advantages            its columns; the report of `rollout` too, where a balanced layout goes by lengths
    collect informative   as many rows as an iteration has, of however many rounds

The driver counts these down, and makes a step's calls when none is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlgraph.ir.intervals import due
from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.iteration import Execution, filled
from rlgraph.runtime.driver.rows import Awaited

Need = tuple[Execution, Awaited]  # an event of an execution: of this iteration, or of one before


def needs_of(execution: Execution, step: Step) -> set[Need]:
    """Return what the calls of a step depend on; of a collect, that its region has enough rows."""
    if step.facts.collects:
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
    rows, columns = execution.rows, execution.columns
    if step.facts.merges:
        return _merge_events(execution, step)
    moves_no_rows = step.inserted and not step.facts.copies
    if not step.reads or moves_no_rows:
        return ()
    domain = columns[step.reads[0]].domain
    if step.facts.layout == "even":  # each row of what it reads several times
        copies = columns[step.writes[0]].domain
        if not rows.is_reported(copies):
            return ()
        return rows.known_by(copies) | rows.known_by(domain, step.layout)
    events = rows.known_by(domain, step.layout)
    if step.facts.layout == "filter":
        events |= rows.known_by(columns[step.writes[0]].domain)
    if step.facts.keeps_types:  # it brings rows from where they lie
        for name in step.reads:
            column = columns[name]
            events |= rows.known_by(column.domain, column.layout)
            events |= rows.known_by(column.domain, step.layout)
    return events


def _merge_events(execution: Execution, step: Step) -> set[Awaited]:
    rows, columns = execution.rows, execution.columns
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
