"""A step's calls are known once reports, references of columns or filled regions are here.

    step                  needs
    rollout               the column `prompts`; the report of `prompts`, which says how many rows there are
    advantages            its columns; the report of `rollout` too, where a balanced layout goes by lengths
    collect informative   round 1 to report; then round 2, where rows are missing

The driver counts these down, and makes a step's calls when none is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlgraph.ir.intervals import due
from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.iteration import Walk, filled
from rlgraph.runtime.driver.rows import Awaited

Need = tuple[Walk, Awaited]  # an event of a walk: of this iteration, or of one before


def needs_of(walk: Walk, step: Step) -> set[Need]:
    """Return what the calls of a step depend on; of a collect, what its region's first round does."""
    if step.facts.collects:
        stream = walk.streams[step.region]
        measured = {need for inner in stream.steps for need in _measured(walk, inner)}
        return measured | {*_positioned(walk, stream.region.source)}
    own = {(walk, event) for event in (*step.reads, *_rows(walk, step))}
    if step.inserted:
        return own
    return own | _measured(walk, step) | {*_positioned(walk, step.node)}


def round_needs(walk: Walk, step: Step) -> set[Need]:
    """Return what a collect waits for while a round runs: each of the round's steps."""
    latest = walk.rounds[step.region][-1]
    return {(latest, inner.id) for inner in latest.steps}


def _rows(walk: Walk, step: Step) -> Iterable[Awaited]:
    """Return what says which rows a step has on each device."""
    rows, columns = walk.rows, walk.columns
    if not step.reads or (step.inserted and not step.facts.copies):
        return ()
    read = columns[step.reads[0]].domain
    if step.facts.layout == "even":  # each row of what it reads several times
        copied = columns[step.writes[0]].domain
        return rows.known_by(copied) | rows.known_by(read, step.layout) if rows.is_partial(copied) else ()
    events = rows.known_by(read, step.layout)
    if step.facts.layout == "filter":
        events |= rows.known_by(columns[step.writes[0]].domain)
    if step.facts.keeps_types:  # it brings rows from where they lie
        events |= {event for name in step.reads for event in rows.known_by(read, columns[name].layout)}
    return events


def _before(walk: Walk) -> Iterator[Walk]:
    """Yield the iterations in flight before one."""
    while walk.before is not None:
        walk = walk.before
        yield walk


def _positioned(walk: Walk, node: str) -> Iterator[Need]:
    """Yield events that tell how many rows a source gave before, and what its region left over."""
    for earlier in _before(walk):
        regions = [name for name, stream in earlier.streams.items() if stream.region.source == node]
        for event in map(filled, regions) if regions else earlier.rows.source_events(node):
            yield earlier, event


def _measured(walk: Walk, step: Step) -> set[Need]:
    """Return what the adaptive attributes of a step follow: see ``adaptive.py``."""
    if step.inserted or not walk.plan.functions[walk.phase][step.node].controllers:
        return set()
    needs, domain = set[Need](), walk.columns[step.reads[0]].domain
    for earlier in _before(walk):
        if due(step.when, earlier.entry.iteration + 1):
            own = [filled(step.region)] if step.region else [step.id, *earlier.rows.known_by(domain)]
            needs |= {(earlier, event) for event in own}
    return needs
