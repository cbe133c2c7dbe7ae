"""One resampling round of a region: its steps once, with the next prompts and unfinished groups.

Prompts are numbered by their position in the data, so that a sample's seed and the number of its group are
its own through the whole run, in whichever round and iteration they come. Groups that an earlier round did
not finish are the first rows of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from rlgraph.ir.plan import Step
from rlgraph.runtime.columns import layouts
from rlgraph.runtime.driver.iteration import Execution
from rlgraph.runtime.driver.row_buffer import Arguments, BufferedRows, Selection, Waiting
from rlgraph.runtime.driver.rows import Awaited
from rlgraph.runtime.driver.worker_shares import WorkerShares

DRAWN = "tokens/generated"  # the metric of rollouts


class Round(Execution):
    """One pass through a region's steps."""

    def __init__(
        self, whole: Execution, steps: Sequence[Step], collect: Step, begun: Waiting, first: int, asks: int
    ) -> None:
        """Start a round for an iteration: its source has given ``first`` rows, and is asked for more."""
        self.plan, self.phase, self.entry = whole.plan, whole.phase, whole.entry
        self.before, self.controls, self.states = whole.before, whole.controls, whole.states
        self.streams, self.rounds = {}, {}
        self.pools = whole.pools | {column: step.pool for step in steps for column in step.writes}
        self.columns, self.domains = whole.columns, whole.domains
        self.region, self.collect = whole.plan.regions[collect.region], collect
        self.first, self.asks, self.begun = first, asks, begun
        self.source = next(step for step in steps if step.node == self.region.source)
        self.partial = next((step for step in steps if step.leaves), None)
        kept = self.source.writes if self.partial else ()
        self._begin(steps, frozenset((*collect.reads, *kept)))
        if self.partial:  # a worker goes on with what it has begun, and may have more of it than its columns
            self.rows.numbered = self.homes

    def position(self, node: str) -> int:
        """Return the rows that a data source has given before the round."""
        return self.first if node == self.source.node else 0

    def drawn(self) -> int:
        """Return the rows that the source gave anew, once it has reported."""
        return self.rows.source_rows(self.source.node) - len(self.begun.prompts)

    def outcome(self) -> tuple[BufferedRows, int]:
        """Return what the region's filter kept, and how many rows there were before any, once it is done."""
        return self._kept(), self.rows.count(self._whole(self.columns[self.collect.reads[0]].domain))

    def groups(self) -> Any:
        """Return int64: the numbers of its prompts."""
        return self.numbers(self.columns[self.source.writes[0]].domain)

    def _kept(self) -> BufferedRows:
        """Return the rows that the region's filter kept."""
        domain, parent = (self.columns[each[0]].domain for each in (self.collect.writes, self.collect.reads))
        rows = self.rows.origin(domain)
        columns = {name: self.selection(name).take(rows) for name in self.collect.reads}
        numbers = self.numbers(parent)[rows] // self.region.times
        return BufferedRows(self.rows.lengths(domain), numbers, self._made(numbers), columns)

    def unfinished(self) -> Waiting:
        """Return the groups that are not whole yet."""
        if self.partial is None:
            return Waiting()
        step, domain = self.partial, self.columns[self.partial.reads[0]].domain
        held = self.rows.layout(domain, step.layout, step.pool)
        open_rows = [np.delete(held[at], self.rows.report(step, at).whole) for at in step.devices]
        rows = np.concatenate(open_rows)
        if not len(rows):
            return Waiting()
        order, times = np.argsort(rows), self._times(step)
        numbers = self.numbers(domain)[rows[order]]
        given = self._given(domain)[rows[order]]
        prompts = {name: self.selection(name).take(given) for name in self.source.writes}
        sizes, places = tuple(len(rows) * times for rows in open_rows), layouts.children([order], times)[0]
        left = [tuple(self.left[device][column] for device in step.devices) for column in range(step.leaves)]
        samples = {str(number): Selection(parts, sizes, places) for number, parts in enumerate(left)}
        each = numbers.repeat(times)
        return Waiting(prompts=self._buffered(numbers, prompts), samples=self._buffered(each, samples))

    def numbers(self, domain: str) -> Any:
        """Return int64 ``[rows]``: the number of each row through the run."""
        if domain in self.rows.filters:
            return self.numbers(self.rows.above(domain))[self.rows.origin(domain)]
        parent, times = self.domains[domain].parent, self.domains[domain].times
        if parent is None:
            new = self.first + np.arange(self.rows.count(domain) - len(self.begun.prompts))
            return np.concatenate([self.begun.prompts.prompts, new])
        above, whole = self.numbers(parent), self.rows.whole(domain)
        return layouts.children([above if whole is None else above[whole]], times)[0]

    def homes(self, domain: str) -> Any:
        """Return int64 ``[rows]``: numbers by which the rows of a source are dealt to devices."""
        return self.numbers(domain)

    def _times(self, step: Step) -> int:
        """Return the rows that a step makes of each row that it reads."""
        return self.domains[self.columns[step.writes[0]].domain].times

    def taken_up(self, step: Step, rows: Any) -> Arguments:
        """Return what an earlier round left for a step on these rows: see ``Worker.run``."""
        if step is self.source and len(self.begun.prompts):
            return self.begun.prompts.gathering(step.writes)
        if step is self.partial and len(self.begun.prompts):
            given = self._given(self.columns[step.reads[0]].domain)[rows]
            begun = layouts.children([given[given < len(self.begun.prompts)]], self._times(step))[0]
            return self.begun.samples.take(begun).gathering([*self.begun.samples.columns])
        return (), ()

    def _given(self, domain: str) -> Any:
        """Return int64 ``[rows]``: which row of the source each row of a domain is, filtered or not."""
        return self.rows.within(domain, self.columns[self.source.writes[0]].domain)

    def _whole(self, domain: str) -> str:
        return self._whole(self.rows.above(domain)) if domain in self.rows.filters else domain

    def _buffered(self, numbers: Any, columns: dict[str, Selection]) -> BufferedRows:
        return BufferedRows(np.zeros(len(numbers), np.int64), numbers, self._made(numbers), columns)

    def _made(self, numbers: Any) -> Any:
        """Return the iteration in which each of some prompts was begun."""
        begun = dict(zip(self.begun.prompts.prompts.tolist(), self.begun.prompts.made.tolist(), strict=True))
        return np.array([begun.get(n, self.entry.iteration) for n in numbers.tolist()], np.int64)


class FlowRound(Round):
    """One round of a region that streams: its weights are those that generation has when it begins."""

    serving: Callable[[], Mapping[str, int]]
    pool: str  # that draws
    in_turn: Collection[int]  # steps that pools take in order: those up to the samples
    places: Mapping[int, int] = MappingProxyType({})  # prompt -> the device that draws its samples
    finished: Any = None  # int64: the numbers of the prompts whose samples have all ended, once that is known

    def given(self) -> int:
        """Return the rows of the source: as many as it is asked for, and those that come again."""
        return int(self.asks) + len(self.begun.prompts)

    def comes_first(self, step: Step) -> list[Awaited]:
        """Return the steps elsewhere whose columns a step reads: generation goes on until they are done."""
        if step.id in self.in_turn:
            return []
        makers = {column: one for one in self.steps for column in one.writes}
        read = [makers[column] for column in step.reads if column in makers]
        return [one.id for one in read if one.beside or one.pool != step.pool]

    def holds(self, step: Step) -> set[str]:
        """Return what gets nothing else while a step waits: of one behind the samples, its round alone."""
        pools = super().holds(step)
        return pools if step.id in self.in_turn else {f"{pool} in round {self.number}" for pool in pools}

    def versions(self, step: Step) -> dict[str, int]:
        """Return the versions that a step reads, as they were sent last."""
        sent = self.serving()
        return super().versions(step) | {name: sent[name] for name in step.models if name in sent}

    def homes(self, domain: str) -> Any:
        """Return the devices that the rows of a source are on."""
        numbers = self.numbers(domain).tolist()
        return np.array([self.places.get(number, number) for number in numbers], np.int64)

    def measure(self, shares: WorkerShares) -> None:
        """Note how fast each device has drawn, where the op tells that of each round."""
        step = self.partial
        if step is None or not shares.moves:
            return
        held = self.rows.layout(self.columns[step.reads[0]].domain, step.layout, step.pool)
        for at in step.devices:
            report = self.rows.report(step, at)
            if DRAWN in report.metrics:
                tokens = report.metrics[DRAWN].value
                shares.measure(at, tokens, len(held[at]), report.end - report.start)
        shares.adapt()

    @property
    def is_drawn(self) -> bool:
        """Return whether it is known which groups have finished."""
        return {self.source.id, self.partial.id} <= self.happened

    def outcome(self) -> tuple[BufferedRows, int]:
        """Return the same as of any round; of one in which no group finished, nothing."""
        if len(self.finished):
            return super().outcome()
        return BufferedRows(), 0
