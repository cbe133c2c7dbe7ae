"""The rules of a region's groups: how many may begin, which rows an iteration takes, and which are too old.

They are pure functions of numbers. Each row that waits in the buffer has the iteration with whose weights it
was begun. With a staleness of 1 and 4 rows per iteration:

    buffer        begun in 6, 6, 7, 7, 7, 7    rows of 6 are too old after iteration 7
    iteration 7   takes 6, 6, 7, 7             rows that would be too late come first, then by arrival
    iteration 8   takes 7, 7 and two more

As many groups may begin as the iterations up to the current one plus the staleness take, so that none is left
over. Where a filter keeps parts of groups, less than one group too many begins, and is dropped later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlgraph.ir.graph import Region
from rlgraph.syntax.settings import Buffer

Arrange = Callable[[Sequence[int]], Sequence[int]]  # places of rows -> the order in which they are taken


@dataclass(frozen=True)
class Window:
    """The bounds of a region: the rows of an iteration and of a group, and how old rows may be.

    A refill is a window of one round: ``refill`` is its region, which says how many groups a round asks for.
    """

    rows: int
    group: int
    staleness: int
    order: str = "fifo"
    too_old: str = "wait"
    in_flight: int | None = None
    refill: Region | None = None

    @staticmethod
    def of_stream(region: Region, stream: Buffer) -> Window:
        """Return the window of a region that streams, as the schedule says."""
        return Window(
            rows=region.rows,
            group=region.times,
            staleness=region.keep,
            order=stream.order,
            too_old=stream.too_old,
            in_flight=stream.in_flight,
        )

    @staticmethod
    def of_refill(region: Region) -> Window:
        """Return the window of a region whose rounds come one at a time, and that drops old rows."""
        return Window(
            rows=region.rows, group=region.times, staleness=region.keep, too_old="drop", refill=region
        )

    def room(self, iterations: int, waiting: int, in_flight: int, drawing: int) -> int:
        """Return how many more groups may begin in a region that streams.

        Args:
            iterations: number of iterations that groups which begin now may be for.
            waiting: rows in the buffer.
            in_flight: groups that have begun and are not in the buffer.
            drawing: those of them whose samples are not finished.

        Example:
            >>> Window(rows=64, group=8, staleness=1).room(2, waiting=64, in_flight=3, drawing=2)
            5
        """
        missing_rows = iterations * self.rows - waiting - in_flight * self.group
        groups = math.ceil(missing_rows / self.group)
        if self.in_flight is not None:
            groups = min(groups, self.in_flight - drawing)
        return max(groups, 0)

    def round_size(self, waiting: int, drawing: int, seen_rows: int, stayed_rows: int) -> int:
        """Return how many new groups the next round of a refill asks for.

        Args:
            waiting: rows in the buffer.
            drawing: groups that an earlier round has begun and not finished.
            seen_rows: rows that the filter saw since an iteration took some.
            stayed_rows: those of them that it kept.
        """
        assert self.refill, "a stream has no rounds of one iteration"
        return max(self.refill.rows_to_request(self.rows - waiting, seen_rows, stayed_rows) - drawing, 0)

    def is_young(self, weights: int, iteration: int) -> bool:
        """Return whether a row that was begun in one iteration may be used in another."""
        return self.too_old == "correct" or weights + self.staleness >= iteration

    def choose(
        self,
        iteration: int,
        row_weights: Sequence[int],
        row_prompts: Sequence[int],
        in_flight: Mapping[int, int],
        arrange: Arrange = lambda places: places,
    ) -> list[int] | None:
        """Return the places in the buffer of the rows that an iteration takes; None while some are missing.

        Args:
            iteration: the one that takes them.
            row_weights: for each row in the buffer, the iteration of its weights; none is too old.
            row_prompts: for each row in the buffer, the number of its prompt.
            in_flight: for each group that has begun and is not in the buffer, prompt -> iteration.
            arrange: puts rows whose order is free in that of the user's policy.

        Example:
            >>> window = Window(rows=2, group=1, staleness=1)
            >>> window.choose(7, [7, 6, 7], [4, 2, 3], {})
            [0, 1]
            >>> window.choose(7, [7, 7], [4, 3], {2: 6}) is None
            True
        """
        if len(row_weights) < self.rows:
            return None
        if self.order == "in_order":
            return self._choose_in_order(row_prompts, in_flight)
        urgent = self._urgent(iteration, row_weights, Counter(in_flight.values()), arrange)
        if urgent is None:
            return None
        chosen = set(urgent)
        free = arrange([place for place in range(len(row_weights)) if place not in chosen])
        return sorted([*urgent, *free[: self.rows - len(urgent)]])

    def _choose_in_order(self, prompts: Sequence[int], in_flight: Mapping[int, int]) -> list[int] | None:
        places = sorted(range(len(prompts)), key=prompts.__getitem__)[: self.rows]
        latest_prompt = prompts[places[-1]]
        earliest_missing = min(in_flight, default=math.inf)
        return places if latest_prompt < earliest_missing else None

    def is_coming(
        self,
        iteration: int,
        row_weights: Sequence[int],
        row_prompts: Sequence[int],
        in_flight: Mapping[int, int],
        measured: Sequence[int],
    ) -> bool:
        """Return whether an iteration has its rows as soon as the groups that are ``measured`` arrive.

        The other arguments are those of ``choose``.
        """
        coming_prompts, coming_weights = list[int](), list[int]()
        for number in measured:
            if number in in_flight:
                coming_prompts += [number] * self.group
                coming_weights += [in_flight[number]] * self.group
        still_missing = {number: in_flight[number] for number in in_flight.keys() - {*measured}}
        places = self.choose(
            iteration, [*row_weights, *coming_weights], [*row_prompts, *coming_prompts], still_missing
        )
        return places is not None

    def _urgent(
        self, iteration: int, row_weights: Sequence[int], in_flight: Counter[int], arrange: Arrange
    ) -> list[int] | None:
        """Return the places of rows for which later iterations have no room before they are too old.

        Rows that were begun in v are usable up to v + staleness, so the earliest deadline comes first. None:
        some urgent rows are not in the buffer yet.
        """
        urgent = list[int]()
        if self.too_old != "wait":
            return urgent
        rows_of = Counter(row_weights)
        for deadline in range(iteration, iteration + self.staleness + 1):
            oldest = deadline - self.staleness  # groups begun then or before are used by this deadline
            waiting = sum(rows for v, rows in rows_of.items() if v <= oldest)
            missing = self.group * sum(groups for v, groups in in_flight.items() if v <= oldest)
            room_later = (deadline - iteration) * self.rows
            needed = waiting + missing - room_later - len(urgent)
            needed = min(needed, self.rows - len(urgent))  # less than a group too many is dropped
            if needed > waiting - len(urgent):
                return None
            if needed > 0:
                chosen = set(urgent)
                due = [place for place, v in enumerate(row_weights) if v <= oldest and place not in chosen]
                urgent += arrange(due)[:needed]
        return urgent
