"""One round of a region: its steps once, with the next prompts of its source and groups that are not whole.

Prompts are numbered by their position in the data, so that a sample's seed and the number of its group are
its own through the whole run, in whichever round and iteration they come. Groups that an earlier round did
not finish are the first rows of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlgraph.plan import Step
from rlgraph.runtime import layout as layouts
from rlgraph.runtime.controls import controls
from rlgraph.runtime.rows import NotYet
from rlgraph.runtime.stock import Held, Stock, Waiting
from rlgraph.runtime.stream import Stream
from rlgraph.runtime.walk import Given, Walk


def more(walk: Walk, step: Step) -> list[tuple[Walk, Step]]:
    """The steps of a region's next round, where ``step`` collects its rows and they are not enough.

    Raises:
        RunError: there were as many rounds as there may be.
    """
    stream = walk.streams.get(step.region)
    if stream is None:
        return []
    try:
        position, waiting = walk.position(stream.region.source), walk.waits(step.region)
        now = controls(walk, stream.steps)
    except NotYet:
        return []
    asks = stream.wants(waiting)
    if asks is None:
        return []
    stream.rounds.append(Round(walk, stream, position + stream.asked, asks, now))
    return [(stream.rounds[-1], one) for one in stream.steps]


class Round(Walk):
    """One pass through a region's steps."""

    def __init__(
        self, whole: Walk, stream: Stream, position: int, asks: int, controls: Mapping[str, float]
    ) -> None:
        """Start one.

        Args:
            whole: the iteration that it is part of.
            stream: the rounds that it is one of.
            position: rows that the source has given before it.
            asks: new rows that it asks of the source.
            controls: adaptive numbers of the iteration.
        """
        self.plan, self.phase, self.entry, self.before = whole.plan, whole.phase, whole.entry, None
        self.positions, self.waiting, self.streams = {stream.region.source: position}, {}, {}
        self.controls = controls
        self.pools, self.columns = whole.pools, whole.columns
        self.region, self.first, self.asks, self.begun = stream.region, position, asks, stream.begun
        self.source = next(step for step in stream.steps if step.node == stream.region.source)
        self.partial = next((step for step in stream.steps if step.leaves), None)
        kept = self.source.writes if self.partial else ()
        self._begin(stream.steps, frozenset((*stream.collect.reads, *kept)))

    def given(self) -> int:
        """New rows that the source gave."""
        return self.rows.given(self.source.node) - len(self.begun.prompts)

    def sampled(self, collect: Step) -> int:
        """Rows that there were before any filter of those that are collected."""
        return self.rows.count(self._whole(self.columns[collect.reads[0]].domain))

    def kept(self, collect: Step) -> Stock:
        """The rows that the region's filter kept."""
        domain, parent = (self.columns[names[0]].domain for names in (collect.writes, collect.reads))
        rows = self.rows.origin(domain)
        columns = {name: self._held(name, self.refs[name]).take(rows) for name in collect.reads}
        numbers = self.numbers(parent)[rows] // self.region.times
        return Stock(self.rows.lengths(domain), numbers, self._made(numbers), columns)

    def unfinished(self) -> Waiting:
        """The groups that are not whole yet."""
        if self.partial is None:
            return Waiting()
        step, domain = self.partial, self.columns[self.partial.reads[0]].domain
        held = self.rows.layout(domain, step.layout, step.pool)
        whole = [self.rows.report(step, device).whole for device in step.devices]
        open_rows = [np.delete(held[device], rows) for device, rows in zip(step.devices, whole, strict=True)]
        rows = np.concatenate(open_rows)
        if not len(rows):
            return Waiting()
        order, times = np.argsort(rows), self.columns[step.writes[0]].times
        numbers = self.numbers(domain)[rows[order]]
        prompts = {name: self._held(name, self.refs[name]).take(rows[order]) for name in self.source.writes}
        sizes, places = tuple(len(rows) * times for rows in open_rows), layouts.children([order], times)[0]
        left = [tuple(self.left[device][column] for device in step.devices) for column in range(step.leaves)]
        samples = {str(number): Held(parts, sizes, places) for number, parts in enumerate(left)}
        each = numbers.repeat(times)
        return Waiting(prompts=self._stock(numbers, prompts), samples=self._stock(each, samples))

    def numbers(self, domain: str) -> Any:
        """int64 ``[rows]``: what each row is numbered by through the run."""
        if domain in self.rows.filters:
            return self.numbers(self.rows.above(domain))[self.rows.origin(domain)]
        parent, times = self.rows.parents[domain]
        if parent is None:
            new = self.first + np.arange(self.rows.count(domain) - len(self.begun.prompts))
            return np.concatenate([self.begun.prompts.prompts, new])
        above, whole = self.numbers(parent), self.rows.whole(domain)
        return layouts.children([above if whole is None else above[whole]], times)[0]

    def taken_up(self, step: Step, rows: Any) -> Given:
        """What an earlier round left for a step on these rows: see ``Worker.run``."""
        if step is self.source and len(self.begun.prompts):
            return self.begun.prompts.gathering(step.writes)
        if step is self.partial and len(self.begun.prompts):
            times = self.columns[step.writes[0]].times
            begun = layouts.children([rows[rows < len(self.begun.prompts)]], times)[0]
            return self.begun.samples.take(begun).gathering([*self.begun.samples.columns])
        return (), ()

    def _whole(self, domain: str) -> str:
        return self._whole(self.rows.above(domain)) if domain in self.rows.filters else domain

    def _held(self, column: str, parts: list[Any]) -> Held:
        """All rows of a column."""
        domain = self.columns[column].domain
        lies = self.rows.layout(domain, self.columns[column].layout, self.pools[column])
        owner, place = layouts.where(lies, self.rows.count(domain))
        sizes = tuple(len(rows) for rows in lies)
        return Held(tuple(parts), sizes, np.cumsum((0, *sizes))[owner] + place)

    def _stock(self, numbers: Any, columns: dict[str, Held]) -> Stock:
        return Stock(np.zeros(len(numbers), np.int64), numbers, self._made(numbers), columns)

    def _made(self, numbers: Any) -> Any:
        """The iteration in which each of some prompts was begun."""
        found = dict(zip(self.begun.prompts.prompts.tolist(), self.begun.prompts.made.tolist(), strict=True))
        return np.array([found.get(n, self.entry.iteration) for n in numbers.tolist()], np.int64)
