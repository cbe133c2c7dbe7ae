"""Signals that ask a run to stop: Ctrl-C, SIGTERM, and SIGHUP of a terminal that was closed."""

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
    """Handles them. The first one that comes while iterations run lets them end; any other ends all at once.

    A signal that the process ignored before, as under ``nohup``, stays ignored.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Create it; ``say`` tells the user that the run stops."""
        self.say = say
        self.came: list[int] = []  # the signal after which no further iteration begins
        self.in_order = False
        self.before: dict[int, Any] = {}
        self.terminals = [fd for fd in OUTPUT if os.isatty(fd)]

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.before = {n: now for n in SIGNALS if (now := signal.getsignal(n)) is not signal.SIG_IGN}
        for number in self.before:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
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
        self.came.append(number)
        with suppress(RuntimeError):  # it came while just that was being written
            self.say(ONCE)

    def _leave_terminal(self) -> None:
        """Send output nowhere in place of a terminal that is gone: writing there is an error."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self.terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)
