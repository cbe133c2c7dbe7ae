"""Intervals: a step runs from one iteration on, every so many. Iterations count from 1, as in metrics.jsonl.

update_critic   x x x x x x x x
update_policy   . . . x x x x x      from 4
refresh         . . . x . . . x      every 4
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

    def within(self, other: Cadence) -> bool:
        """Return whether all of its iterations are among another's."""
        return self.every % other.every == 0 and other.due(self.first)

    def __str__(self) -> str:
        often = f"every {self.every}" if self.every > 1 else ""
        start = f"from {self.first}" if self.first != self.every else ""
        return " ".join(filter(None, (often, start)))


Cadences = tuple[Cadence, ...]  # an iteration is due where one of them is; none of them: in every one
ALWAYS = Cadence(1, 1)


def due(when: Sequence[Cadence], iteration: int) -> bool:
    """Return whether a step with these intervals runs in this iteration."""
    return not when or any(cadence.due(iteration) for cadence in when)


def union(several: Iterable[Sequence[Cadence]]) -> Cadences:
    """Return the intervals in which at least one of several steps runs, as few as possible.

    Example:
        >>> union([[Cadence(20, 1)], [Cadence(4, 4), Cadence(40, 8)]])
        (Cadence(first=4, every=4), Cadence(first=20, every=1))
        >>> union([[Cadence(20, 1)], []])
        ()
    """
    cadences: set[Cadence] = set()
    for when in several:
        cadences.update(when or (ALWAYS,))
    if ALWAYS in cadences:
        return ()
    return tuple(sorted(cadence for cadence in cadences if not _is_covered(cadence, cadences - {cadence})))


def within(when: Sequence[Cadence], wider: Sequence[Cadence]) -> bool:
    """Return whether each iteration of some intervals is one of the wider ones.

    Example:
        >>> within([Cadence(4, 4)], [Cadence(2, 2)]), within([], [Cadence(2, 2)]), within([Cadence(2, 2)], [])
        (True, False, True)
    """
    if not wider:
        return True
    return bool(when) and all(_is_covered(cadence, wider) for cadence in when)


def _is_covered(cadence: Cadence, wider: Iterable[Cadence]) -> bool:
    return any(cadence.within(other) for other in wider)


def count(when: Sequence[Cadence], iterations: int) -> int:
    """Return how many of the first iterations a step runs in."""
    if not when:
        return iterations
    return sum(due(when, iteration) for iteration in range(1, iterations + 1))


def share(when: Sequence[Cadence]) -> float:
    """Return the share of the iterations in which a step runs in the long run.

    Example:
        >>> share([Cadence(20, 1)]), share([Cadence(4, 4), Cadence(6, 6)])
        (1.0, 0.3333333333333333)
    """
    span, start = min(cycle([when]), COUNTED), settled([when])
    return sum(due(when, start + n) for n in range(span)) / span


def cycle(several: Iterable[Sequence[Cadence]]) -> int:
    """Return the number of iterations after which the pattern repeats, once all steps have begun."""
    return math.lcm(*(cadence.every for when in several for cadence in when))


def settled(several: Iterable[Sequence[Cadence]]) -> int:
    """Return the iteration in which the last of several steps has begun."""
    return max((cadence.first for when in several for cadence in when), default=1)


def words(when: Sequence[Cadence]) -> str:
    """Return text as ``every 4`` or ``every 4 and from 20``; nothing for every iteration."""
    return " and ".join(map(str, when))
