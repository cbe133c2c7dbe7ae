"""Notes when groups of a region that streams were begun, drawn, in the buffer, and used."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlgraph.runtime.driver.intake import GroupSpan, IntakeTimes, StageSeconds


class StreamClock:
    """The times of a stream that no report of a step says, in seconds since the epoch.

    Invariants:
        - ``times`` has groups that are in flight or wait, and none that was used or dropped.
        - ``lanes`` has one entry for each group that is drawn or waits at the same time as others.
        - ``blocked_since`` is 0 as long as a round may begin.
    """

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {}  # prompt -> when it was begun, drawn, in the buffer, so far
        self.lanes: list[float] = []  # when each became free
        self.start = time.time()  # when the latest iteration had its rows
        self.request = self.start  # when the next one asked for its own
        self.blocked_seconds = 0.0
        self.blocked_since = 0.0

    def ask(self) -> None:
        """Note that an iteration asks for rows."""
        self.request = time.time()

    def note(self, numbers: Iterable[int]) -> None:
        """Note that groups have come a step further; a checkpoint has those not known to be begun."""
        now = time.time()
        for number in numbers:
            self.times.setdefault(number, [now]).append(now)

    def begin(self, numbers: Iterable[int]) -> None:
        """Note that a round begins, and some groups with it."""
        now = time.time()
        for number in numbers:
            self.times[number] = [now]
        if self.blocked_since:
            self.blocked_seconds += now - self.blocked_since
        self.blocked_since = 0.0

    def stand(self) -> None:
        """Note that no round may begin."""
        if not self.blocked_since:
            self.blocked_since = time.time()

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget groups that nobody will use."""
        for number in numbers:
            self.times.pop(number, None)

    def use(self, waiting: Sequence[int], rows: int) -> IntakeTimes:
        """Return the times of the iteration that has its rows now.

        Args:
            waiting: the prompt of each row in the buffer.
            rows: how many of them it takes.
        """
        now = time.time()
        if self.blocked_since:
            self.blocked_seconds += now - self.blocked_since
            self.blocked_since = now
        arrivals = sorted(max(self.times.get(number, [0.0])[-1], self.start) for number in waiting)
        enough = arrivals[rows - 1]
        buffer = StageSeconds(
            busy=enough - arrivals[0], starved=arrivals[0] - self.start, blocked=now - enough
        )
        times = IntakeTimes(self.start, self.request, now, self.blocked_seconds, buffer)
        self.start = now
        self.blocked_seconds = 0.0
        return times

    def spans(self, weights: Mapping[int, int]) -> Iterator[GroupSpan]:
        """Yield when groups were drawn, and when they waited, each in the first lane that was free.

        ``weights`` has the iteration of its weights for each prompt that is used now.
        """
        known = [(self.times.pop(number), number) for number in weights if number in self.times]
        for (begin, drawing_end, *_), number in sorted(known):
            lane = self._take_lane(begin)
            yield f"group {lane}", f"prompt {number}, weights {weights[number]}", begin, drawing_end
            yield f"group {lane}", f"prompt {number} waits", drawing_end, self.start

    def _take_lane(self, begin: float) -> int:
        """Return the first lane that was free at a time; it is taken until now."""
        for lane, free in enumerate(self.lanes):
            if free <= begin:
                self.lanes[lane] = self.start
                return lane
        self.lanes.append(self.start)
        return len(self.lanes) - 1
