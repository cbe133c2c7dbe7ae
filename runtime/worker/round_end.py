"""Tells workers that a round of generation is to end, over the store at which they have met.

    train    update | send |  update          what is sent waits for a token, not for a round
    gen[0]   round ────────┤ receive   round
    gen[1]   round ────────┤ receive   round

A worker that has drawn a round's tokens ends it for the others of its pool too: none waits for a slower one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist


class RoundEnd:
    """One worker's view of it; without a store no round ends before its time."""

    def __init__(self, store: dist.Store | None, pool: str) -> None:
        self.store = store
        self.pool = pool
        self.received = 0
        self.rounds = Counter[str]()

    def sends(self, pool: str) -> None:
        """Note that weights wait for a pool."""
        if self.store:
            self.store.add(f"weights for {pool}", 1)

    def receives(self) -> None:
        """Note that weights that waited for this worker have come."""
        self.received += 1

    def begin(self, node: str) -> Callable[[], bool]:
        """Begin a node's next round; return what says whether it is to end."""
        self.rounds[node] += 1
        store = self.store
        number = self.rounds[node]

        def is_due() -> bool:
            assert store
            with suppress(dist.DistError):
                waits = store.add(f"weights for {self.pool}", 0) > self.received
                return waits or store.add(f"{node} on {self.pool}", 0) >= number
            return True  # the worker that has the store is gone, as the driver will say

        return is_due if store else lambda: False

    def end(self, node: str) -> None:
        """Note that this worker's round is over, though there was more to draw."""
        with suppress(dist.DistError):
            if self.store:
                self.store.set(f"{node} on {self.pool}", str(self.rounds[node]))
