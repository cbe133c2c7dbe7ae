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
from dataclasses import dataclass, field

from rlgraph.ir.graph import Region
from rlgraph.syntax.settings import Stream

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

    @staticmethod
    def of(region: Region, stream: Stream) -> Admission:
        """Return the rules of a region, as the schedule says."""
        own = region.rows, region.times, region.keep
        return Admission(*own, stream.order, stream.too_old, stream.in_flight)

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
        first = self._first(iteration, begun, Counter(unused.values()), arrange)
        if first is None:
            return None
        here = {*first}
        others = arrange([place for place in range(len(begun)) if place not in here])
        return sorted([*first, *others[: self.rows - len(first)]])

    def is_coming(
        self,
        iteration: int,
        begun: Sequence[int],
        prompts: Sequence[int],
        unused: Mapping[int, int],
        measured: Sequence[int],
    ) -> bool:
        """Return whether an iteration has its rows once those of the groups that are ``measured`` are there.

        The other arguments are as of ``chosen``.
        """
        rows = [number for number in measured if number in unused for _ in range(self.group)]
        drawn = {number: unused[number] for number in unused.keys() - {*measured}}
        here = [*begun, *(unused[number] for number in rows)]
        return self.chosen(iteration, here, [*prompts, *rows], drawn) is not None

    def _first(
        self, iteration: int, begun: Sequence[int], unused: Counter[int], arrange: Arrange
    ) -> list[int] | None:
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
                first += arrange([p for p, v in enumerate(begun) if v <= oldest and p not in taken])[:need]
        return first


@dataclass
class Stock:
    """What was begun and not used: the same account as the runtime keeps, with numbers alone.

    Example:
        >>> stock = Stock(Admission(rows=4, group=2, staleness=0))
        >>> [*stock.begin()], stock.begin(), stock.take()
        ([0, 1], range(2, 2), None)
        >>> stock.finish(1, 2), stock.finish(0, 2), stock.take()
        (None, None, [(1, 0), (1, 0), (0, 0), (0, 0)])
    """

    rules: Admission
    begun: list[int] = field(default_factory=list)  # of each row in the buffer, when it was begun
    prompts: list[int] = field(default_factory=list)
    unused: dict[int, int] = field(default_factory=dict)  # prompt of a group that is not there -> the same
    unfinished: dict[int, int] = field(default_factory=dict)  # those that are still drawn
    position: int = 0  # the next prompt
    now: int = 0  # the iteration whose weights generate
    given: int = 0  # the iteration that has its rows next
    dropped: int = 0  # rows

    def room(self, last: float = math.inf) -> int:
        """Return how many groups more may be begun, in a run of ``last`` iterations."""
        iterations = int(min(self.now + 1 + self.rules.staleness, last)) - self.given
        return self.rules.room(iterations, len(self.begun), len(self.unused), len(self.unfinished))

    def begin(self, last: float = math.inf) -> range:
        """Begin as many groups as may be; return their prompts."""
        new = range(self.position, self.position + self.room(last))
        self.unused |= dict.fromkeys(new, self.now)
        self.unfinished |= dict.fromkeys(new, self.now)
        self.position += len(new)
        return new

    def may_change(self, last: float = math.inf) -> bool:
        """Return whether new weights may come: in order, only where nothing is begun and not drawn."""
        return self.rules.order != "in_order" or not (self.unused or self.room(last))

    def drop_old(self) -> list[int]:
        """Drop rows and unfinished groups that are too old by now; return the groups."""
        young = [p for p, begun in enumerate(self.begun) if self.rules.is_young(begun, self.given)]
        old = [n for n, begun in self.unfinished.items() if not self.rules.is_young(begun, self.given)]
        for number in old:
            del self.unfinished[number], self.unused[number]
        self.dropped += len(self.begun) - len(young) + len(old) * self.rules.group
        self._keep(young)
        return old

    def finish(self, number: int, kept: int) -> None:
        """Put the rows of a group that the filter kept into the buffer, unless they are too old by now."""
        self.unfinished.pop(number, None)
        begun = self.unused.pop(number)
        if not self.rules.is_young(begun, self.given):
            self.dropped, kept = self.dropped + kept, 0
        self.begun += [begun] * kept
        self.prompts += [number] * kept

    def take(self) -> list[tuple[int, int]] | None:
        """Return prompt and begin of the rows that the next iteration takes; None while some are missing."""
        places = self.rules.chosen(self.given, self.begun, self.prompts, self.unused)
        if places is None:
            return None
        taken = [(self.prompts[place], self.begun[place]) for place in places]
        self._keep(sorted({*range(len(self.begun))} - {*places}))
        self.given += 1
        return taken

    def _keep(self, places: Sequence[int]) -> None:
        self.begun = [self.begun[place] for place in places]
        self.prompts = [self.prompts[place] for place in places]
