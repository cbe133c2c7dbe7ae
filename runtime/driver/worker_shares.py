"""Shares of what a stream has begun, by worker: a slow one is noticed, and gets fewer groups.

    speed   1.00  0.98  0.40      tokens per second of each sample that is under way
    share      1     1   0.4      noise moves nothing; none gets less than a quarter
    groups    16    16     6      a new group goes to who has the fewest for its share

The speed is that of a sample, not of a worker: one that has fewer samples does not look slower for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

FORGETS = 0.9  # what a round before counts
ROUNDS = 8  # a worker is judged by so many at least
# as parts of the others' speed: above it a worker is as fast; below it, much slower; and the least share
ALIKE, MUCH, LEAST = 0.75, 0.5, 0.25


class WorkerShares:
    """Keeps the worker of each group that is under way, and the shares by which new ones are dealt."""

    def __init__(self, workers: int, deals: bool, moves: bool) -> None:
        """Start with equal shares.

        Args:
            workers: how many there are.
            deals: whether groups go by shares; else a group's number says which worker has it.
            moves: whether each round tells what a worker has drawn, from which another can go on.
        """
        self.deals, self.moves, self.homes = deals, moves, dict[int, int]()
        self.tokens, self.seconds, self.rounds = np.zeros(workers), np.zeros(workers), 0
        self.shares = np.ones(workers)

    def measure(self, worker: int, tokens: float, samples: int, seconds: float) -> None:
        """Add a round: what a worker has drawn in it, of how many samples, in which time."""
        self.tokens[worker] = FORGETS * self.tokens[worker] + tokens
        self.seconds[worker] = FORGETS * self.seconds[worker] + samples * seconds

    def speeds(self) -> list[float]:
        """Return each worker's speed as a part of the median of the others; nothing before it is known.

        Example:
            >>> shares = WorkerShares(2, deals=True, moves=True)
            >>> shares.rounds = ROUNDS
            >>> shares.measure(0, 640, 8, 1.0), shares.measure(1, 256, 8, 1.0)
            (None, None)
            >>> shares.speeds()
            [2.5, 0.4]
        """
        if len(self.shares) < 2 or self.rounds < ROUNDS or not (self.seconds.all() and self.tokens.any()):
            return []
        rates = self.tokens / self.seconds
        speeds = list[float]()
        for worker, rate in enumerate(rates):
            median = float(np.median(np.delete(rates, worker)))
            speeds.append(float(rate / median) if median else 1.0)
        return speeds

    def adapt(self) -> None:
        """Set the shares anew where speeds have changed by more than noise does."""
        self.rounds += 1
        for worker, speed in enumerate(self.speeds()):
            wanted = 1.0 if speed > ALIKE else max(speed, LEAST)
            if abs(wanted - self.shares[worker]) > (1 - ALIKE) * self.shares[worker]:
                self.shares[worker] = wanted

    def deal(self, numbers: Sequence[int], under_way: Sequence[int]) -> None:
        """Give new groups to workers; ``under_way`` are those of which more is to be drawn."""
        has = Counter(self.homes[number] for number in under_way)
        for number in numbers:
            self.homes[number] = self._next(has) if self.deals else number % len(self.shares)
            has[self.homes[number]] += 1

    def go_on(self, under_way: Sequence[int]) -> None:
        """Forget other groups than these; let others take up the oldest of a much slower worker."""
        self.homes = {number: self.homes[number] for number in under_way}
        has = Counter(self.homes.values())
        for number in sorted(under_way) if self.deals and self.moves else ():
            worker = self.homes[number]
            most = len(under_way) * self.shares[worker] / self.shares.sum()
            if self.shares[worker] < MUCH and has[worker] > max(most, 1):
                has[worker] -= 1
                self.homes[number] = self._next(has)
                has[self.homes[number]] += 1

    def _next(self, has: Counter[int]) -> int:
        """Return the worker that has the fewest groups for its share."""
        return min(range(len(self.shares)), key=lambda worker: (has[worker] + 1) / self.shares[worker])
