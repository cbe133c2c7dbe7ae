"""Notes when groups of a region that streams were begun, drawn, in the buffer, and used."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlgraph.runtime.driver.intake import GroupSpan, IntakeTimes


class StreamClock:
    """Notes when groups of a region that streams were begun, drawn, in the buffer, and used."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {}  # number of a prompt -> when each happened, so far
        self.lanes: list[float] = []  # when each became free
        self.since = self.asked = time.time()
        self.held, self.stands = 0.0, 0.0  # seconds in which nothing might begin; since when, 0: it may

    def ask(self) -> None:
        """Note that an iteration asks for rows."""
        self.asked = time.time()

    def note(self, numbers: Iterable[int]) -> None:
        """Note that groups have come a step further; a checkpoint has those not known to be begun."""
        now = time.time()
        for number in numbers:
            self.times.setdefault(number, [now]).append(now)

    def begin(self, numbers: Iterable[int]) -> None:
        """Note that a round begins, and some groups with it."""
        now = time.time()
        self.times |= {number: [now] for number in numbers}
        self.held, self.stands = self.held + (now - self.stands if self.stands else 0.0), 0.0

    def stand(self) -> None:
        """Note that no round may begin."""
        self.stands = self.stands or time.time()

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget groups that nobody will use."""
        for number in numbers:
            self.times.pop(number, None)

    def use(self, waiting: Sequence[int], rows: int) -> IntakeTimes:
        """Return the window that ends now, with so many rows for an iteration among the groups that wait."""
        until, since, held = time.time(), self.since, self.held
        came = sorted(max(self.times.get(number, [0.0])[-1], since) for number in waiting)
        if self.stands:
            held, self.stands = held + until - self.stands, until
        self.since, self.held = until, 0.0
        buffer = came[rows - 1] - came[0], came[0] - since, until - came[rows - 1]
        return IntakeTimes(since, self.asked, until, held, buffer)

    def spans(self, made: Mapping[int, int]) -> Iterator[GroupSpan]:
        """Yield when groups were drawn, and when they waited, each in the first lane that was free.

        ``made``: of each that is used now, the iteration with whose weights it was begun.
        """
        known = sorted((self.times.pop(number), number) for number in made if number in self.times)
        for (begun, drawn, *_), number in known:
            lane = next((at for at, end in enumerate(self.lanes) if end <= begun), len(self.lanes))
            self.lanes[lane : lane + 1] = [self.since]
            yield f"group {lane}", f"prompt {number}, weights {made[number]}", begun, drawn
            yield f"group {lane}", f"prompt {number} waits", drawn, self.since
