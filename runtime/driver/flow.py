"""A region that streams: its rounds go on through the iterations, and rows wait in one buffer for an update.

    gen      round 7 | round 8 | sync | round 9 | round 10 ...     a round: some tokens for all that is begun
    host         rewards of 6, 7 ...                               of the groups that finished in it
    train    update 1: 512 rows of the buffer    | update 2 ...

What is begun and not used is bounded, and no row waits for ever: see ``rlgraph/planning/admission.py``.

A checkpoint has what waits, and what was begun as it was before the oldest round that is still under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, Step
from rlgraph.planning.admission import Admission
from rlgraph.runtime.driver.adaptive import controls
from rlgraph.runtime.driver.iteration import Entry, Execution, filled
from rlgraph.runtime.driver.refill import by_policy
from rlgraph.runtime.driver.refill_round import FlowRound
from rlgraph.runtime.driver.row_buffer import BufferedRows, Waiting, joined
from rlgraph.runtime.driver.stages import GroupSpan, StreamClock, Window
from rlgraph.runtime.driver.worker_shares import WorkerShares

# rounds that are under way at a time: at first, while processes beside workers start, and later
FEW, MOST = 2, 16


@dataclass
class Intake:
    """The rows of a region that streams in one iteration."""

    flow: Flow
    iteration: int
    used: BufferedRows | None = None  # set once they are here
    values: dict[str, float] = field(default_factory=dict)
    spans: tuple[GroupSpan, ...] = ()  # of its groups: from when they were begun, and from when they waited
    window: Window | None = None  # set with ``used``

    def __post_init__(self) -> None:
        self.region, self.asked, self.steps = self.flow.region, 0, self.flow.steps
        self.pools = {self.flow.collect.pool}

    def release(self) -> None:
        """Release the columns: all are collected."""
        assert self.used
        self.used = replace(self.used, columns={})

    def leaves(self) -> Waiting:
        """Return what waits for later."""
        return self.flow.waiting()

    def measured(self) -> dict[str, float]:
        """Return metrics: see docs/metrics.md."""
        speeds = self.flow.shares.speeds()
        pool = self.flow.steps[self.flow.drawing - 1].pool
        values = {f"{self.region.filter}/{name}": value for name, value in self.values.items()}
        return values | {f"perf/speed/{pool}-{device}": speed for device, speed in enumerate(speeds)}


class Flow:
    """The rounds of one region through a run, and what waits behind them."""

    def __init__(
        self, plan: Plan, name: str, waiting: Waiting, position: int, serving: Callable[[], Mapping[str, int]]
    ) -> None:
        """Start where ``position`` rows of the source were taken, with what a checkpoint has left waiting."""
        assert plan.schedule.stream
        self.settings, self.region, self.serving = plan.schedule.stream, plan.regions[name], serving
        self.rules = Admission.of(self.region, self.settings)
        every = [step for step in plan.steps if step.region == name]
        self.steps = [step for step in every if not step.facts.collects]
        self.collect = next(step for step in every if step.facts.collects)
        self.drawing = 1 + next(at for at, step in enumerate(self.steps) if step.leaves)
        self.models = {model for step in self.steps if step.generates for model in step.models}
        moving = any(step.facts.moves for step in self.steps)
        self.in_turn = {step.id for step in self.steps[: None if moving else self.drawing]}
        drawing = self.steps[self.drawing - 1]
        moves = plan.functions["train"][drawing.node].attributes.get("stays", False)
        deals = self.settings.order != "in_order"
        self.shares = WorkerShares(plan.pools[drawing.pool], deals, moves)
        self.shares.deal(waiting.prompts.prompts.tolist(), ())
        self.buffer, self.position = waiting.rows, position
        self.begun = Waiting(prompts=waiting.prompts, samples=waiting.samples)
        # number of a prompt -> the iteration whose weights it was begun with; until its rows wait
        pairs = zip(waiting.prompts.prompts.tolist(), waiting.prompts.made.tolist(), strict=True)
        self.ahead: dict[int, int] = dict(pairs)
        self.clock = StreamClock()
        self.open: deque[FlowRound] = deque()  # the last may be drawing; rows of the others are measured
        self.wanted: deque[tuple[Execution, Intake]] = deque()
        self.past: list[Execution] = []  # rounds that have ended since an iteration took rows
        self.whole: Execution | None = None  # the latest iteration that asked for rows
        self.last = plan.iterations
        self.now, self.given = 0, 0  # iterations: of the weights; that have rows
        self.seen, self.stayed, self.dropped = 0, 0, 0  # rows since an iteration took some
        self.ended = 0  # rounds

    def intake(self, iteration: int) -> Intake:
        """Return what an iteration's rows come to."""
        return Intake(self, iteration)

    def want(self, execution: Execution, intake: Intake) -> None:
        """Let an iteration have its rows as soon as they are here."""
        if self.whole is None:
            self.given = execution.entry.iteration
        self.whole = execution
        self.clock.ask()
        self.wanted.append((execution, intake))

    def synced(self, iteration: int) -> None:
        """Note that rounds begun from here on have the weights on entry to an iteration."""
        self.now = max(self.now, iteration)

    def waiting(self) -> Waiting:
        """Return what a checkpoint has to have: all that was begun and not used."""
        begun = self.open[0].begun if self.open else self.begun
        return Waiting(self.buffer, begun.prompts, begun.samples)

    def taken(self) -> int:
        """Return the rows of the source that ``waiting`` and iterations have."""
        return self.open[0].first if self.open else self.position

    @property
    def is_settled(self) -> bool:
        """Return whether nothing that was begun is unfinished."""
        return not self.open and not self.ahead and not self._room()

    def advance(self) -> list[tuple[Execution, Step]]:
        """Take up what has come in; return the steps of the next round, where one may begin.

        Raises:
            RunError: the region's filter keeps too little.
        """
        while self.open and self.open[0].done:
            self._absorb(self.open.popleft())
        self._give()
        if self.whole is None or (self.open and not self.open[-1].is_drawn):
            return []
        measured = self._drawn(self.open[-1]) if self.open else []
        asks = self._room()
        if len(self.open) >= min(FEW + self.ended, MOST) or (not asks and not len(self.begun.prompts)):
            self.clock.stand()
            return measured
        numbers = range(self.position, self.position + asks)
        self.shares.deal(numbers, self.begun.prompts.prompts.tolist())
        now = controls(self.whole, self.steps)
        latest = FlowRound(self.whole, self, self.position, asks, now)
        latest.entry, latest.serving = Entry(self.now, self.whole.entry.versions), self.serving
        latest.in_turn, latest.yields = self.in_turn, self.shares.deals
        latest.shares, latest.places = self.shares, {**self.shares.homes}
        self.ahead |= dict.fromkeys(numbers, self.now)
        self.clock.begin(numbers)
        self.position += asks
        self.open.append(latest)
        return [*measured, *((latest, step) for step in self.steps[: self.drawing])]

    def _drawn(self, latest: FlowRound) -> list[tuple[Execution, Step]]:
        """Return the steps behind the samples of a round, which are taken if some group has finished."""
        if latest.finished is not None:
            return []
        left, behind = latest.unfinished(), self.steps[self.drawing :]
        latest.finished = np.setdiff1d(latest.groups(), left.prompts.prompts)
        latest.measure()
        self.begun = self._young(left)
        self.clock.note(latest.finished.tolist())
        self.shares.go_on(self.begun.prompts.prompts.tolist())
        if len(latest.finished):
            return [(latest, step) for step in behind]
        latest.steps = self.steps[: self.drawing]
        latest.unsubmitted -= {step.id for step in behind}
        return []

    def _room(self) -> int:
        """Return how many groups more may be begun."""
        iterations = min(self.now + 1 + self.region.keep, self.last) - self.given
        return self.rules.room(iterations, len(self.buffer), len(self.ahead), len(self.begun.prompts))

    def _absorb(self, ended: FlowRound) -> None:
        """Put the rows of a round into the buffer."""
        outcome = ended.outcome()
        for number in ended.finished.tolist():
            self.ahead.pop(number, None)
        self.clock.note(ended.finished.tolist())
        self.clock.drop(np.setdiff1d(ended.finished, outcome.buffered.prompts).tolist())
        self.buffer = joined([self.buffer, outcome.buffered])
        self.seen += outcome.seen
        self.stayed += len(outcome.buffered)
        self.past.append(ended)
        self.ended += 1
        most = self.region.rounds * (self.region.keep + 1) * self.region.rows / self.region.expected
        if self.seen > most and not self.stayed:
            raise RunError(self._too_few())

    def _young(self, begun: Waiting) -> Waiting:
        """Return what was begun without the groups that are given up, as they are too old."""
        young = self._are_young(begun.prompts, self.given)
        if young.all():
            return begun
        for number in begun.prompts.prompts[~young].tolist():
            self.ahead.pop(number, None)
        self.clock.drop(begun.prompts.prompts[~young].tolist())
        self.dropped += int((~young).sum()) * self.region.times
        rows = np.flatnonzero(young)
        each = np.flatnonzero(young.repeat(self.region.times))
        return Waiting(prompts=begun.prompts.left(rows), samples=begun.samples.left(each))

    def _give(self) -> None:
        """Give iterations that wait for rows theirs, as far as they are here."""
        while self.wanted:
            execution, intake = self.wanted[0]
            young = np.flatnonzero(self._are_young(self.buffer, intake.iteration))
            self.dropped += len(self.buffer) - len(young)
            self.buffer = self.buffer.left(young)
            now = self._chosen(intake.iteration)
            if now is None:
                return
            self.wanted.popleft()
            intake.window = self.clock.use(self.buffer.prompts.tolist(), self.region.rows)
            intake.used = self.buffer.take(now)
            rest = np.setdiff1d(np.arange(len(self.buffer)), now)
            self.buffer = self.buffer.left(rest)
            intake.values = self._measured(intake.used, intake.iteration)
            made = zip(intake.used.prompts.tolist(), intake.used.made.tolist(), strict=True)
            intake.spans = tuple(self.clock.spans(dict(made)))
            execution.rounds[self.region.filter], self.past = self.past, []
            self.given, self.seen, self.stayed, self.dropped = intake.iteration + 1, 0, 0, 0
            execution.happened.add(filled(self.region.filter))

    def _are_young(self, rows: BufferedRows, iteration: int) -> Any:
        """Return bool: of each row whether it may be used in an iteration."""
        return np.array([self.rules.is_young(made, iteration) for made in rows.made.tolist()], bool)

    def _chosen(self, iteration: int) -> Any:
        """Return int64: the places of the rows that an iteration takes; None where some are missing."""

        def arrange(places: Sequence[int]) -> Sequence[int]:
            ordered: list[int] = self._in_order(np.array(places, np.int64), iteration).tolist()
            return ordered

        made, prompts = self.buffer.made.tolist(), self.buffer.prompts.tolist()
        places = self.rules.chosen(iteration, made, prompts, self.ahead, arrange)
        return None if places is None else np.array(places, np.int64)

    def _in_order(self, places: Any, iteration: int) -> Any:
        """Return some places in the buffer in the order in which they are taken."""
        if self.settings.order == "fifo" or not len(places):
            return places
        waits = self.buffer.take(places)
        return places[np.concatenate(by_policy(waits, self.settings.order, iteration, self.region.rows))]

    def _measured(self, used: BufferedRows, iteration: int) -> dict[str, float]:
        age, begun = iteration - used.made, len(self.begun.prompts)
        values = {"age": age.mean(), "age_max": age.max(), "waiting": len(self.buffer), "unfinished": begun}
        values |= {"stayed": self.stayed / self.seen} if self.seen else {}
        values |= {"dropped": self.dropped, "rounds": len(self.past)}
        return {name: float(value) for name, value in values.items()}

    def _too_few(self) -> str:
        law = f"`{self.region.filter}` kept none of {self.seen} rows that were sampled for an iteration"
        return f"{law}\n  give data that it keeps more of, or another filter"
