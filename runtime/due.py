"""Decides after which iterations something periodic is due: a checkpoint, an evaluation, a record.

Its interval is measured on one of three clocks: iterations, seconds of the run, or rows that a source has
given. It is due after the iteration in which its clock passed a multiple of the interval:

    0.5 epochs of 10 rows, 4 in an iteration     4   8  12  16  20     rows after each iteration
                                                 .   x   x   x   x     past 5, 10, 15, 20

The driver decides once per iteration, for all devices. A checkpoint has the clocks, so that they continue
when a run is resumed. An interval in iterations, or in rows of a source from which each iteration takes the
same number, can be foreseen: a pipeline that runs ahead is drained there, at the same place in every run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from rlgraph.ir.plan import Plan
from rlgraph.syntax.interval import Interval

SAVE = "save"
EVALUATE = "evaluate"
RECORD = "record"
seconds_now = time.monotonic  # a test may set another clock


@dataclass(frozen=True)
class Clocks:
    """The progress of a run: iterations done, seconds, and the rows that each source has given."""

    iteration: int
    seconds: float
    positions: Mapping[str, int]


class DueTimes:
    """The intervals of a plan.

    Attributes:
        intervals: by ``SAVE``, ``EVALUATE`` and ``RECORD``, those that the plan has.
        rows: the number of rows of each source in which epochs are counted.
        rows_per_iteration: for each of these sources, the rows that each iteration takes, if that is known.
    """

    def __init__(self, plan: Plan, rows: Mapping[str, int]) -> None:
        """Create it; ``preflight`` has counted the ``rows`` of each source."""
        settings = {SAVE: plan.schedule.save_every, RECORD: plan.schedule.record_every}
        if plan.eval_steps:
            settings[EVALUATE] = plan.eval_every
        self.intervals = {name: interval for name, interval in settings.items() if interval}
        self.rows = rows
        self.rows_per_iteration: dict[str, int] = {}
        for interval in self.intervals.values():
            if isinstance(interval, Interval) and interval.epochs:
                rows_taken = _rows_per_iteration(plan, interval.source, rows[interval.source])
                if rows_taken:
                    self.rows_per_iteration[interval.source] = rows_taken

    def after(self, previous: Clocks, now: Clocks) -> frozenset[str]:
        """Return what is due after an iteration, from the clocks before and after it."""
        due_names = set[str]()
        for name, interval in self.intervals.items():
            if self._multiples(interval, now) > self._multiples(interval, previous):
                due_names.add(name)
        return frozenset(due_names)

    def may_come(self, name: str, iteration: int, now: Clocks) -> bool:
        """Return whether something may be due after a later iteration; if it can be foreseen, whether it is.

        Args:
            name: what may be due.
            iteration: the number of iterations that will be done then, above that of ``now``.
            now: the clocks after the last iteration that is done.
        """
        interval = self.intervals.get(name)
        if interval is None:
            return False
        if isinstance(interval, Interval) and interval.source not in self.rows_per_iteration:
            return True
        multiples_before = self._multiples(interval, self._foreseen(iteration - 1, now))
        return self._multiples(interval, self._foreseen(iteration, now)) > multiples_before

    def _foreseen(self, iteration: int, now: Clocks) -> Clocks:
        """Return the clocks after a later iteration, as far as they can be foreseen."""
        iterations_ahead = iteration - now.iteration
        positions: dict[str, int] = {}
        for source, rows in self.rows_per_iteration.items():
            positions[source] = now.positions.get(source, 0) + iterations_ahead * rows
        return Clocks(iteration, now.seconds, positions)

    def _multiples(self, interval: int | Interval, clocks: Clocks) -> int:
        """Return how many multiples of an interval its clock has passed."""
        if isinstance(interval, int):
            return clocks.iteration // interval
        if interval.seconds:
            return int(clocks.seconds // interval.seconds)
        length = interval.epochs * self.rows[interval.source]
        return int(Fraction(clocks.positions.get(interval.source, 0)) // length)


def _rows_per_iteration(plan: Plan, source: str, source_rows: int) -> int | None:
    """Return the rows that each iteration takes from a source; None if filters or schedules decide that."""
    function = plan.functions["train"][source]
    for step in plan.steps:
        if step.node == source and (step.region or step.when):
            return None
    if function.roles["rows"] in function.courses:
        return None
    rows = function.value("rows")
    if rows == "all":
        return source_rows
    return rows if isinstance(rows, int) else None
