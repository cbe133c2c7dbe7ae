"""The rules of a region that streams: how many groups may be begun, and which rows an iteration takes.

Pure functions of numbers, which the runtime (``Flow``) and the simulator (stream_simulation.py) both follow.
Of what waits, each row has the iteration with whose weights it was begun. With a staleness of 1 and 4 rows:

    waits         begun in 6, 6, 7, 7, 7, 7    those of 6 are too old after iteration 7
    iteration 7   takes 6, 6, 7, 7             what would be too late comes first, then who was first to end
    iteration 8   takes 7, 7 and two more

So much may be begun as the iterations up to now + staleness take, so that none is left over; by less than a
group more where a filter keeps parts of groups, which is dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Arrange = Callable[[Sequence[int]], Sequence[int]]  # places of rows -> the order in which they are taken


@dataclass(frozen=True)
class Admission:
    """What bounds a region that streams: ``schedule.stream``, and the rows of an iteration and of a group."""

    rows: int
    group: int
    staleness: int
    order: str = "fifo"
    too_old: str = "wait"
    in_flight: int | None = None

    def room(self, iterations: int, waiting: int, unused: int, unfinished: int) -> int:
        """Return how many groups more may be begun.

        Args:
            iterations: those that what is begun now may be for.
            waiting: rows in the buffer.
            unused: groups that were begun and are not in it.
            unfinished: those of them that are not drawn to the end.

        Example:
            >>> Admission(rows=64, group=8, staleness=1).room(2, waiting=64, unused=3, unfinished=2)
            5
        """
        groups = math.ceil((iterations * self.rows - waiting - unused * self.group) / self.group)
        if self.in_flight is not None:
            groups = min(groups, self.in_flight - unfinished)
        return max(groups, 0)

    def is_young(self, begun: int, iteration: int) -> bool:
        """Return whether a row that was begun in one iteration may be used in another."""
        return self.too_old == "correct" or begun + self.staleness >= iteration

    def chosen(
        self,
        iteration: int,
        begun: Sequence[int],
        prompts: Sequence[int],
        unused: Mapping[int, int],
        arrange: Arrange = lambda places: places,
    ) -> list[int] | None:
        """Return the places in the buffer of the rows that an iteration takes; None while some are missing.

        Args:
            iteration: that takes them.
            begun: of each row in the buffer, the iteration in which it was begun; none is too old.
            prompts: of each the number of its prompt.
            unused: of each group that is begun and not in the buffer, prompt -> the iteration.
            arrange: puts rows that come in any order in that of the user's policy.

        Example:
            >>> rules = Admission(rows=2, group=1, staleness=1)
            >>> rules.chosen(7, [7, 6, 7], [4, 2, 3], {})
            [0, 1]
            >>> rules.chosen(7, [7, 7], [4, 3], {2: 6}) is None
            True
        """
        if len(begun) < self.rows:
            return None
        if self.order == "in_order":
            places = sorted(range(len(begun)), key=prompts.__getitem__)[: self.rows]
            return places if prompts[places[-1]] < min(unused, default=math.inf) else None
        first = self._first(iteration, begun, Counter(unused.values()))
        if first is None:
            return None
        here = {*first}
        others = arrange([place for place in range(len(begun)) if place not in here])
        return sorted([*first, *others[: self.rows - len(first)]])

    def _first(self, iteration: int, begun: Sequence[int], unused: Counter[int]) -> list[int] | None:
        """Return the places of the rows that the iterations to come have no room for before they are too old.

        Those that were begun in v are used up to v + staleness: the earliest deadline comes first.
        """
        first, waiting = list[int](), Counter(begun)
        for end in range(iteration, iteration + self.staleness + 1) if self.too_old == "wait" else ():
            oldest = end - self.staleness  # what was begun then or before comes now, or up to this one
            mine = sum(rows for v, rows in waiting.items() if v <= oldest)
            late = mine + self.group * sum(groups for v, groups in unused.items() if v <= oldest)
            need = late - (end - iteration) * self.rows - len(first)
            need = min(need, self.rows - len(first))  # what is less than a group too many is dropped
            if need > mine - len(first):
                return None
            if need > 0:
                taken = {*first}
                first += [p for p, v in enumerate(begun) if v <= oldest and p not in taken][:need]
        return first
