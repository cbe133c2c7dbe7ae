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
    known = (*step.reads, *_rows(execution, step), *execution.comes_first(step))
    own = {(execution, event) for event in known}
    if step.inserted:
        return own
    before = {*_positioned(execution, step.node), *_stated(execution, step)}
    return own | _measured(execution, step) | before


def _rows(execution: Execution, step: Step) -> Iterable[Awaited]:
    """Return what says which rows a step has on each device."""
    rows, columns = execution.rows, execution.columns
    if step.facts.merges:
        whole = rows.known_by(columns[step.writes[0]].domain, step.layout)
        parts = [columns[name] for name in step.reads]
        return whole.union(*(rows.known_by(part.domain, part.layout) for part in parts))
    if not step.reads or (step.inserted and not step.facts.copies):
        return ()
    read = columns[step.reads[0]].domain
    if step.facts.layout == "even":  # each row of what it reads several times
        copied = columns[step.writes[0]].domain
        return rows.known_by(copied) | rows.known_by(read, step.layout) if rows.is_reported(copied) else ()
    events = rows.known_by(read, step.layout)
    if step.facts.layout == "filter":
        events |= rows.known_by(columns[step.writes[0]].domain)
    if step.facts.keeps_types:  # it brings rows from where they lie
        brought = [columns[name] for name in step.reads]
        events |= {e for c in brought for at in (c.layout, step.layout) for e in rows.known_by(c.domain, at)}
    return events


def _before(execution: Execution) -> Iterator[Execution]:
    """Yield the iterations in flight before one."""
    while execution.previous is not None:
        execution = execution.previous
        yield execution


def _positioned(execution: Execution, node: str) -> Iterator[Need]:
    """Yield events that tell how many rows a source gave before."""
    for earlier in _before(execution):
        yield from ((earlier, event) for event in earlier.rows.source_events(node))


def _measured(execution: Execution, step: Step) -> set[Need]:
    """Return what the adaptive attributes of a step follow: see ``adaptive.py``."""
    if step.inserted or not execution.plan.functions[execution.phase][step.node].controllers:
        return set()
    needs, domain = set[Need](), execution.columns[step.reads[0]].domain
    for earlier in _before(execution):
        if due(step.when, earlier.entry.iteration + 1):
            own = [filled(step.region)] if step.region else [step.id, *earlier.rows.known_by(domain)]
            needs |= {(earlier, event) for event in own}
    return needs


def _stated(execution: Execution, step: Step) -> Iterator[Need]:
    """Yield the events in iterations before by which the state that a step has is known."""
    node = None if step.inserted else execution.plan.functions[execution.phase][step.node].state
    for earlier in _before(execution) if node else ():
        yield from ((earlier, keeper.id) for keeper in earlier.steps if keeper.node == node)
