"""Shows the progress of a search on stderr: in place on a terminal, else a line now and then."""

from __future__ import annotations

import time
from typing import TextIO

IN_PLACE, IN_LOGS = 0.2, 15.0  # seconds between two messages, on a terminal and elsewhere
CLEAR = "\r\033[K"  # goes to the line's begin and erases it (ECMA-48)


class SearchProgress:
    """Says how many placements a search knows, and which part of them it has tried.

    Invariants:
        - Messages are at least ``interval`` seconds apart, and a short search writes none.
        - On a terminal there is one line, which ``close`` removes.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.in_place = stream.isatty()
        self.interval = IN_PLACE if self.in_place else IN_LOGS
        self.last = time.monotonic()
        self.has_line = False

    def __call__(self, tried: int, known: int) -> None:
        """Write a message if one is due.

        Args:
            tried: placements that are planned and priced.
            known: placements that the search has found worth a try so far, those among them.
        """
        now = time.monotonic()
        if now - self.last < self.interval:
            return
        self.last = now
        text = f"{known:,} placements, {tried / known:.0%} tried"
        if self.in_place:
            self.stream.write(f"{CLEAR}{text}")
            self.has_line = True
        else:
            self.stream.write(f"{text}\n")
        self.stream.flush()

    def close(self) -> None:
        """Remove the line from a terminal."""
        if self.has_line:
            self.stream.write(CLEAR)
            self.stream.flush()
            self.has_line = False
