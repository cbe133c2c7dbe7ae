"""Intervals: a step runs from one iteration on, every so many. Iterations count from 1, as in metrics.jsonl.

update_critic   x x x x x x x x
update_policy   . . . x x x x x      from 4
refresh         . . . x . . . x      every 4
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

COUNTED = 100_000  # most iterations that are looked at to count a share


@dataclass(frozen=True, order=True)
class Cadence:
    """Iterations ``first``, ``first + every``, ``first + 2 every``, and so on.

    Example:
        >>> str(Cadence(20, 1)), str(Cadence(4, 4)), str(Cadence(1, 2))
        ('from 20', 'every 4', 'every 2 from 1')
    """

    first: int
    every: int

    def due(self, iteration: int) -> bool:
        """Return whether an iteration is due."""
        return iteration >= self.first and (iteration - self.first) % self.every == 0

    def within(self, wider: Cadence) -> bool:
        """Return whether all of its iterations are among another's."""
        return self.every % wider.every == 0 and wider.due(self.first)

    def __str__(self) -> str:
        interval = f"every {self.every}"
        start = f"from {self.first}"
        if self.every == 1:
            return start if self.first != 1 else ""
        return interval if self.first == self.every else f"{interval} {start}"


Cadences = tuple[Cadence, ...]  # an iteration is due where one of them is; none of them: in every one
ALWAYS = Cadence(1, 1)


def due(intervals: Sequence[Cadence], iteration: int) -> bool:
    """Return whether a step with these intervals runs in this iteration."""
    if not intervals:
        return True
    return any(cadence.due(iteration) for cadence in intervals)


def union(several: Iterable[Sequence[Cadence]]) -> Cadences:
    """Return the intervals in which at least one of several steps runs, as few as possible.

    Example:
        >>> union([[Cadence(20, 1)], [Cadence(4, 4), Cadence(40, 8)]])
        (Cadence(first=4, every=4), Cadence(first=20, every=1))
        >>> union([[Cadence(20, 1)], []])
        ()
    """
    cadences: set[Cadence] = set()
    for intervals in several:
        cadences.update(intervals or (ALWAYS,))
    if ALWAYS in cadences:
        return ()
    needed = []
    for cadence in sorted(cadences):
        if not _is_covered(cadence, cadences - {cadence}):
            needed.append(cadence)
    return tuple(needed)


def within(intervals: Sequence[Cadence], wider: Sequence[Cadence]) -> bool:
    """Return whether each iteration of some intervals is one of the wider ones.

    Example:
        >>> within([Cadence(4, 4)], [Cadence(2, 2)]), within([], [Cadence(2, 2)]), within([Cadence(2, 2)], [])
        (True, False, True)
    """
    if not wider:
        return True
    if not intervals:
        return False
    return all(_is_covered(cadence, wider) for cadence in intervals)


def _is_covered(cadence: Cadence, wider: Iterable[Cadence]) -> bool:
    return any(cadence.within(candidate) for candidate in wider)


def count(intervals: Sequence[Cadence], iterations: int) -> int:
    """Return how many of the first iterations a step runs in."""
    if not intervals:
        return iterations
    return sum(due(intervals, iteration) for iteration in range(1, iterations + 1))


def share(intervals: Sequence[Cadence]) -> float:
    """Return the share of the iterations in which a step runs in the long run.

    Example:
        >>> share([Cadence(20, 1)]), share([Cadence(4, 4), Cadence(6, 6)])
        (1.0, 0.3333333333333333)
    """
    start = settled([intervals])
    span = min(cycle([intervals]), COUNTED)
    return sum(due(intervals, iteration) for iteration in range(start, start + span)) / span


def cycle(several: Iterable[Sequence[Cadence]]) -> int:
    """Return the number of iterations after which the pattern repeats, once all steps have begun."""
    return math.lcm(*(cadence.every for cadence in chain.from_iterable(several)))


def settled(several: Iterable[Sequence[Cadence]]) -> int:
    """Return the iteration in which the last of several steps has begun."""
    return max((cadence.first for cadence in chain.from_iterable(several)), default=1)


def words(intervals: Sequence[Cadence]) -> str:
    """Return text as ``every 4`` or ``every 4 and from 20``; nothing for every iteration."""
    return " and ".join(map(str, intervals))
