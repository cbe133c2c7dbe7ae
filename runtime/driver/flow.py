"""A region that streams: its rounds go on through the iterations, and rows wait in one buffer for an update.

    gen      round 7 | round 8 | sync | round 9 | round 10 ...     a round: some tokens for all that is begun
    host         rewards of 6, 7 ...                               of the groups that finished in it
    train    update 1: 512 rows of the buffer    | update 2 ...

What is begun and not used is bounded, and no row waits for ever: see ``rlgraph/planning/admission.py``.
While an iteration waits for rows, rounds run on a pool that the plan lends, too, over some of what is begun:

    train    update 1 | lent 8 | lent 10 |   update 2     it waits for a round that is under way
    gen      round 7    round 9    round 11 ...           and goes on with what the lent ones have left

A checkpoint has what waits, and what was begun as it was before the oldest round that is still under way.

One file: rounds, what they leave and the buffer are one state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.steps import ONE
from rlgraph.planning.admission import Admission
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.refill import Rounds, by_policy, some
from rlgraph.runtime.driver.refill_round import DRAWN, FlowRound
from rlgraph.runtime.driver.row_buffer import BufferedRows, Waiting, joined
from rlgraph.runtime.driver.stages import StreamClock
from rlgraph.runtime.driver.worker_shares import WorkerShares

# rounds that are under way at a time: at first, while processes beside workers start, and later
FEW, MOST = 2, 16


class Flow(Rounds):
    """The rounds of a region that streams: any number at a time, begun as its rules say."""

    def __init__(
        self, plan: Plan, name: str, waiting: Waiting, position: int, serving: Callable[[], Mapping[str, int]]
    ) -> None:
        """Start as ``Rounds``; ``serving`` returns the versions that were sent to generate."""
        super().__init__(plan, name, waiting, position)
        assert plan.schedule.stream
        self.settings, self.serving = plan.schedule.stream, serving
        self.rules = Admission.of(self.region, self.settings)
        self.drawing = 1 + next(at for at, step in enumerate(self.steps) if step.leaves)
        self.models = {model for step in self.steps if step.generates for model in step.models}
        moving = any(step.facts.moves for step in self.steps)
        self.in_turn = {step.id for step in self.steps[: None if moving else self.drawing]}
        drawing = self.steps[self.drawing - 1]
        self.home, self.sizes = drawing.pool, plan.pools
        self.lender = next((pool for pool, step in plan.lenders.items() if self.models & {*step.models}), "")
        moves = plan.functions["train"][drawing.node].attributes.get("stays", False)
        deals = self.settings.order != "in_order"
        self.shares = WorkerShares(plan.pools[self.home], deals, moves)
        self.shares.deal(waiting.prompts.prompts.tolist(), ())
        self.pools, self.sooner = {self.collect.pool}, {self.lender}
        # number of a prompt -> the iteration whose weights it was begun with; until its rows wait
        pairs = zip(waiting.prompts.prompts.tolist(), waiting.prompts.made.tolist(), strict=True)
        self.ahead: dict[int, int] = dict(pairs)
        self.clock = StreamClock()
        self.at: dict[str, FlowRound] = {}  # pool -> the round that it draws
        self.last = plan.iterations
        self.now, self.dropped = 0, 0  # the iteration of the weights; rows since an iteration took some
        self.ended = 0  # rounds
        self.had: Any = np.zeros(0, np.int64)  # the groups of the latest round on a pool that is lent

    def want(self, execution: Execution) -> None:
        """Let an iteration have its rows; rounds are begun for the latest."""
        if self.whole is None:
            self.given = execution.entry.iteration
        self.whole = execution
        self.clock.ask()
        super().want(execution)

    def synced(self, iteration: int) -> None:
        """Note that rounds begun from here on have the weights on entry to an iteration."""
        self.now = max(self.now, iteration)

    def waiting(self) -> Waiting:
        """Return what a checkpoint has to have: all that was begun and not used."""
        if not self.lender:  # a round goes on with what the one before has left
            return super().waiting()
        every = [*(one.begun for one in self.open), self.begun]
        first, seen, parts = self.taken(), np.zeros(0, np.int64), list[Waiting]()
        for begun in every:
            numbers = begun.prompts.prompts
            parts.append(some(begun, (numbers < first) & ~np.isin(numbers, seen)))
            seen = np.concatenate([seen, numbers])
        return replace(_together(parts), rows=self.buffer)

    @property
    def is_settled(self) -> bool:
        """Return whether nothing that was begun is unfinished; only in order weights wait for that."""
        in_order = self.settings.order == "in_order"
        return not in_order or not (self.open or self.ahead or self._room())

    def advance(self) -> list[tuple[Execution, Step]]:
        """Take up what has come in; return the steps of the next round, where one may begin.

        Raises:
            RunError: the region's filter keeps too little.
        """
        steps = [
            one for pool in [*self.at] if self.at[pool].is_drawn for one in self._drawn(self.at.pop(pool))
        ]
        while self.open and self.open[0].done:
            self._absorb(self.open.popleft())
        while self.wanted:
            iteration = self.wanted[0][0].entry.iteration
            self._drop_old(iteration)
            if (places := self._chosen(iteration)) is None:
                break
            self._give(places)
        if self.whole is None:
            return []
        if len(self.open) < min(FEW + self.ended, MOST):
            lent = self._lent()
            if self.home not in self.at:
                steps += self._begin(self.home, self.begun, self._room())
            steps += self._begin(self.lender, lent, 0)
        if self.home not in self.at:
            self.clock.stand()
        return steps

    def _begin(self, pool: str, begun: Waiting, asks: int) -> list[tuple[Execution, Step]]:
        """Return the steps that draw a round on a pool, if there is something to draw."""
        if not asks and not len(begun.prompts):
            return []
        assert self.whole
        steps = [self._on(step, pool) for step in self.steps]
        latest = FlowRound(self.whole, steps, self.collect, begun, self.position, asks)
        latest.entry, latest.serving = Entry(self.now, self.whole.entry.versions), self.serving
        latest.pool, latest.in_turn, latest.yields = pool, self.in_turn, self.shares.deals
        numbers = range(self.position, self.position + asks)
        if pool == self.home:
            self.shares.deal(numbers, begun.prompts.prompts.tolist())
            latest.places = {**self.shares.homes}
        self.ahead |= dict.fromkeys(numbers, self.now)
        self.clock.begin(numbers)
        self.position += asks
        self.open.append(latest)
        self.at[pool] = latest
        if pool == self.home:
            self.begun = Waiting()
        return [(latest, step) for step in latest.steps[: self.drawing]]

    def _on(self, step: Step, pool: str) -> Step:
        """Return a step with a pool in place of the one that generates."""
        if step.pool != self.home or pool == self.home:
            return step
        devices = step.devices if step.layout == ONE else tuple(range(self.sizes[pool]))
        return replace(step, pool=pool, devices=devices)

    def _lent(self) -> Waiting:
        """Take out of what is begun, and not drawn now, the groups of the next round on a pool that is lent.

        It has as many as its share of the devices, those that it had before first, then the latest. There are
        none where no iteration waits, or its rows are measured already.
        """
        if not self.lender or self.lender in self.at or not self.wanted:
            return Waiting()
        measured = [n for one in self.open if one.finished is not None for n in one.finished.tolist()]
        here = self.buffer.made.tolist(), self.buffer.prompts.tolist()
        if self.rules.is_coming(self.wanted[0][0].entry.iteration, *here, self.ahead, measured):
            return Waiting()
        numbers = self.begun.prompts.prompts
        count = len(numbers)
        if self.home not in self.at:
            count = count * self.sizes[self.lender] // (self.sizes[self.lender] + self.sizes[self.home])
        order = np.lexsort((numbers, np.isin(numbers, self.had)))
        mine = np.isin(np.arange(len(numbers)), order[len(numbers) - count :])
        self.had, lent = numbers[mine], some(self.begun, mine)
        self.begun = some(self.begun, ~mine)
        return lent

    def _drawn(self, latest: FlowRound) -> list[tuple[Execution, Step]]:
        """Return the steps behind the samples of a round, which are taken if some group has finished."""
        left, behind = latest.unfinished(), latest.steps[self.drawing :]
        latest.finished = np.setdiff1d(latest.groups(), left.prompts.prompts)
        self.begun = _together([self.begun, self._young(left)])
        self.clock.note(latest.finished.tolist())
        if latest.pool == self.home:
            latest.measure(self.shares)
            done = set(latest.finished.tolist())
            self.shares.go_on([n for n in self.shares.homes if n in self.ahead and n not in done])
        if len(latest.finished):
            return [(latest, step) for step in behind]
        latest.steps = latest.steps[: self.drawing]
        latest.unsubmitted -= {step.id for step in behind}
        return []

    def _room(self) -> int:
        """Return how many groups more may be begun."""
        iterations = min(self.now + 1 + self.region.keep, self.last) - self.given
        return self.rules.room(iterations, len(self.buffer), len(self.ahead), self._unfinished())

    def _unfinished(self) -> int:
        """Return how many groups are not drawn to the end."""
        drawn = sum(len(one.begun.prompts) + (one.asks or 0) for one in self.at.values())
        return len(self.begun.prompts) + drawn

    def _absorb(self, ended: FlowRound) -> None:
        """Put the rows of a round into the buffer."""
        super()._absorb(ended)
        for number in ended.finished.tolist():
            self.ahead.pop(number, None)
        self.clock.note(ended.finished.tolist())
        self.clock.drop(np.setdiff1d(ended.finished, self.buffer.prompts).tolist())
        self.ended += 1
        most = self.region.rounds * (self.region.keep + 1) * self.region.rows / self.region.expected
        if self.seen > most and not self.stayed:
            raise RunError(self._none_stayed())

    def _young(self, begun: Waiting) -> Waiting:
        """Return what was begun without the groups that are given up, as they are too old."""
        young = self._are_young(begun.prompts, self.given)
        for number in begun.prompts.prompts[~young].tolist():
            self.ahead.pop(number, None)
        self.clock.drop(begun.prompts.prompts[~young].tolist())
        self.dropped += int((~young).sum()) * self.region.times
        return some(begun, young)

    def _give(self, places: Any) -> None:
        intake = self.wanted[0][1]
        intake.window = self.clock.use(self.buffer.prompts.tolist(), self.region.rows)
        super()._give(places)
        assert intake.used
        made = zip(intake.used.prompts.tolist(), intake.used.made.tolist(), strict=True)
        intake.spans = tuple(self.clock.spans(dict(made)))
        speeds = self.shares.speeds()
        intake.values |= {f"perf/speed/{self.home}-{device}": speed for device, speed in enumerate(speeds)}
        self.dropped = 0

    def _drop_old(self, iteration: int) -> None:
        """Drop rows that are too old for an iteration; groups that are begun are as their round ends."""
        young = self._are_young(self.buffer, iteration)
        self.dropped += int((~young).sum())
        self.clock.drop(self.buffer.prompts[~young].tolist())
        self.buffer = self.buffer.left(np.flatnonzero(young))

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
        age, begun = iteration - used.made, self._unfinished()
        values = {"age": age.mean(), "age_max": age.max(), "waiting": len(self.buffer), "unfinished": begun}
        values |= {"stayed": self.stayed / self.seen} if self.seen else {}
        values |= {"dropped": self.dropped, "rounds": len(self.past)}
        if self.lender:
            lent = [one for one in self.past if one.pool == self.lender]
            reports = [report for one in lent for report in one.rows.reports[one.partial.id].values()]
            tokens = [report.metrics[DRAWN].value for report in reports if DRAWN in report.metrics]
            values |= {"lent_rounds": len(lent), "lent_tokens": sum(tokens)}
        return {name: float(value) for name, value in values.items()}

    def _none_stayed(self) -> str:
        law = f"`{self.region.filter}` kept none of {self.seen} rows that were sampled for an iteration"
        return f"{law}\n  give data that it keeps more of, or another filter"


def _together(parts: Sequence[Waiting]) -> Waiting:
    """Return what several parts of what was begun are together."""
    prompts, samples = (joined([getattr(one, name) for one in parts]) for name in ("prompts", "samples"))
    return Waiting(prompts=prompts, samples=samples)
