"""Shares of a stream's groups, by worker: a slow worker is noticed, and gets fewer groups.

    speed   1.00  0.98  0.40      tokens per second of each sample that is under way
    share      1     1   0.4      noise moves nothing; none gets less than a quarter
    groups    16    16     6      a new group goes to who has the fewest for its share

The speed is that of a sample, not of a worker: one that has fewer samples does not look slower for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

DECAY = 0.9  # the weight of each round against the next one
MIN_ROUNDS = 8  # before workers are compared
# fractions of the other workers' median speed
AS_FAST = 0.75  # a worker above this counts as fast as the others
MUCH_SLOWER = 0.5  # one below this passes groups that are under way to others
MIN_SHARE = 0.25


class WorkerShares:
    """The worker of each group that is under way, and the shares by which new groups are dealt.

    Invariants:
        - ``homes`` has a worker for each group that is under way, and for no other once ``go_on`` was called.
        - ``tokens`` and ``seconds`` are sums over rounds in which each round counts ``DECAY`` of the next.
        - A share is between ``MIN_SHARE`` and 1.
    """

    def __init__(self, workers: int, deals: bool, moves: bool) -> None:
        """Start with equal shares.

        Args:
            workers: how many there are.
            deals: whether groups go by shares; else a group's number says which worker has it.
            moves: whether each round tells what a worker has drawn, from which another can go on.
        """
        self.deals = deals
        self.moves = moves
        self.homes: dict[int, int] = {}  # group -> worker
        self.tokens = np.zeros(workers)
        self.seconds = np.zeros(workers)
        self.rounds = 0
        self.shares = np.ones(workers)

    def measure(self, worker: int, tokens: float, samples: int, seconds: float) -> None:
        """Add a round: what a worker has drawn in it, of how many samples, in which time."""
        self.tokens[worker] = DECAY * self.tokens[worker] + tokens
        self.seconds[worker] = DECAY * self.seconds[worker] + samples * seconds

    def speeds(self) -> list[float]:
        """Return each worker's speed as a part of the median of the others; nothing before it is known.

        Example:
            >>> shares = WorkerShares(2, deals=True, moves=True)
            >>> shares.rounds = MIN_ROUNDS
            >>> shares.measure(0, 640, 8, 1.0), shares.measure(1, 256, 8, 1.0)
            (None, None)
            >>> shares.speeds()
            [2.5, 0.4]
        """
        if len(self.shares) < 2 or self.rounds < MIN_ROUNDS:
            return []
        have_all_drawn = self.seconds.all() and self.tokens.any()
        if not have_all_drawn:
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
            wanted = 1.0 if speed > AS_FAST else max(speed, MIN_SHARE)
            noise = (1 - AS_FAST) * self.shares[worker]
            if abs(wanted - self.shares[worker]) > noise:
                self.shares[worker] = wanted

    def deal(self, numbers: Sequence[int], under_way: Sequence[int]) -> None:
        """Give new groups to workers; ``under_way`` are those of which more is to be drawn."""
        load = Counter(self.homes[number] for number in under_way)
        for number in numbers:
            worker = self._least_loaded(load) if self.deals else number % len(self.shares)
            self.homes[number] = worker
            load[worker] += 1

    def go_on(self, under_way: Sequence[int]) -> None:
        """Forget other groups than these; let others take up the oldest of a much slower worker."""
        self.homes = {number: self.homes[number] for number in under_way}
        if not (self.deals and self.moves):
            return
        load = Counter(self.homes.values())
        for number in sorted(under_way):  # the oldest first
            worker = self.homes[number]
            if self.shares[worker] >= MUCH_SLOWER:
                continue
            groups_by_share = len(under_way) * self.shares[worker] / self.shares.sum()
            if load[worker] > max(groups_by_share, 1):
                load[worker] -= 1
                new_worker = self._least_loaded(load)
                self.homes[number] = new_worker
                load[new_worker] += 1

    def _least_loaded(self, load: Counter[int]) -> int:
        """Return the worker that has the fewest groups for its share."""
        return min(range(len(self.shares)), key=lambda worker: (load[worker] + 1) / self.shares[worker])
