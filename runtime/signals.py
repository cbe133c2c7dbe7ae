"""What asks a run to stop: Ctrl-C, SIGTERM, SIGHUP of a terminal that was closed, and a time limit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OUTPUT = (1, 2)  # file descriptors
ONCE = "stopping after what has begun; Ctrl-C again to stop at once"


class StopSignals:
    """Handles them. The first signal while iterations run lets them end; any other ends all at once.

    The time limit lets them end, whenever it comes. A signal that the process ignored before, as under
    ``nohup``, stays ignored.
    """

    def __init__(self, say: Callable[[str], None], time_limit: float | None = None) -> None:
        """Create it; ``say`` tells the user that the run stops. The time limit is seconds from its start."""
        self.say = say
        self.came: list[str] = []  # what it was after which no further iteration begins
        self.timer = threading.Timer(time_limit or 0, self._stop, ["the time limit"]) if time_limit else None
        self.in_order = False
        self.before: dict[int, Any] = {}
        self.terminals = [fd for fd in OUTPUT if os.isatty(fd)]

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.before = {n: now for n in SIGNALS if (now := signal.getsignal(n)) is not signal.SIG_IGN}
        for number in self.before:
            signal.signal(number, self._handle)
        if self.timer:
            self.timer.daemon = True
            self.timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.timer:
            self.timer.cancel()
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @contextmanager
    def orderly(self) -> Iterator[None]:
        """Let the first signal that comes in the block only be noted in ``came``."""
        self.in_order = True
        try:
            yield
        finally:
            self.in_order = False

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self.came or not self.in_order:
            raise KeyboardInterrupt
        self._stop(signal.Signals(number).name)

    def _stop(self, reason: str) -> None:
        self.came.append(reason)
        with suppress(RuntimeError):  # it came while just that was being written
            self.say(f"{reason}: {ONCE}")

    def _leave_terminal(self) -> None:
        """Send output nowhere in place of a terminal that is gone: writing there is an error."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self.terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)
