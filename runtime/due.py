"""Decides after which iterations something comes that has an interval: a checkpoint, an evaluation, a record.

An interval is measured on one of three clocks: iterations, seconds of the run, or rows that a source has
given. After an iteration in which its clock has passed a multiple of it, it is due:

    0.5 epochs of 10 rows, 4 in an iteration     4   8  12  16  20     rows after each iteration
                                                 .   x   x   x   x     past 5, 10, 15, 20

The driver decides once per iteration, for all devices. A checkpoint has the clocks, so that they go on where
they were. What comes by iterations or by rows that are known before is foreseen: a pipeline that runs ahead
is emptied there, and so the same way in every run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from rlgraph.ir.plan import Plan
from rlgraph.syntax.interval import Interval

SAVE, EVALUATE, RECORD = "save", "evaluate", "record"
seconds_now = time.monotonic  # a test may set another clock


@dataclass(frozen=True)
class Clocks:
    """How far a run is: iterations done, its seconds, and the rows that each source has given."""

    iteration: int
    seconds: float
    positions: Mapping[str, int]


class DueTimes:
    """The intervals of a plan, and how many rows the sources have whose epochs they count."""

    def __init__(self, plan: Plan, rows: Mapping[str, int]) -> None:
        """Create it; ``rows`` are those of each source that ``preflight`` has counted."""
        every = {SAVE: plan.schedule.save_every, RECORD: plan.schedule.record_every}
        every |= {EVALUATE: plan.eval_every} if plan.eval_steps else {}
        self.intervals = {name: interval for name, interval in every.items() if interval}
        self.rows = rows
        sources = {one.source for one in self.intervals.values() if isinstance(one, Interval) and one.epochs}
        # source -> the rows that each iteration takes, where that is known before
        self.taken = {source: taken for source in sources if (taken := _taken(plan, source, rows[source]))}

    def after(self, before: Clocks, now: Clocks) -> frozenset[str]:
        """Return what is due after an iteration, from the clocks before it and behind it."""
        return frozenset(
            name
            for name, interval in self.intervals.items()
            if self._count(interval, now) > self._count(interval, before)
        )

    def may_come(self, name: str, iteration: int, now: Clocks) -> bool:
        """Return whether something may be due after an iteration to come, or is, where that is foreseen.

        Args:
            name: what.
            iteration: the number of iterations done then, above that of ``now``.
            now: the clocks after the last iteration that is done.
        """
        if (interval := self.intervals.get(name)) is None:
            return False
        if isinstance(interval, Interval) and interval.source not in self.taken:
            return True
        before, then = (self._foreseen(number, now) for number in (iteration - 1, iteration))
        return self._count(interval, then) > self._count(interval, before)

    def _foreseen(self, iteration: int, now: Clocks) -> Clocks:
        ahead = iteration - now.iteration
        given = now.positions
        positions = {name: given.get(name, 0) + ahead * taken for name, taken in self.taken.items()}
        return Clocks(iteration, now.seconds, positions)

    def _count(self, interval: int | Interval, clocks: Clocks) -> int:
        """Return how many multiples of an interval its clock has passed."""
        if isinstance(interval, int):
            return clocks.iteration // interval
        if interval.seconds:
            return int(clocks.seconds // interval.seconds)
        length = interval.epochs * self.rows[interval.source]
        return int(Fraction(clocks.positions.get(interval.source, 0)) // length)


def _taken(plan: Plan, source: str, rows: int) -> int | None:
    """Return the rows that each iteration takes of a source; None where filters or intervals decide."""
    function = plan.functions["train"][source]
    taken = function.value("rows")
    steps = [step for step in plan.steps if step.node == source]
    if any(step.region or step.when for step in steps) or function.roles["rows"] in function.courses:
        return None
    return rows if taken == "all" else taken if isinstance(taken, int) else None
