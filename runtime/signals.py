"""Handles requests to stop a run: Ctrl-C, SIGTERM, SIGHUP when its terminal closes, and a time limit."""

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
    """Handles signals and the time limit of a run.

    The first signal during iterations lets the one that runs end in order; any other signal ends the run at
    once. The time limit always lets the iteration end. A signal that was ignored before, as under ``nohup``,
    stays ignored.
    """

    def __init__(self, say: Callable[[str], None], time_limit: float | None = None) -> None:
        """Create it; ``say`` tells the user that the run stops, ``time_limit`` is in seconds."""
        self.say = say
        self.reasons: list[str] = []  # why no further iteration begins; empty while the run goes on
        self.timer: threading.Timer | None = None
        if time_limit:
            self.timer = threading.Timer(time_limit, self._stop, ["the time limit"])
        self.in_order = False
        self.previous_handlers: dict[int, Any] = {}
        self.terminals = [descriptor for descriptor in OUTPUT if os.isatty(descriptor)]

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:
                    self.previous_handlers[number] = handler
                    signal.signal(number, self._handle)
        if self.timer:
            self.timer.daemon = True
            self.timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.timer:
            self.timer.cancel()
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def orderly(self) -> Iterator[None]:
        """Let the first signal in the block only add to ``reasons``."""
        self.in_order = True
        try:
            yield
        finally:
            self.in_order = False

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self.reasons or not self.in_order:
            raise KeyboardInterrupt
        self._stop(signal.Signals(number).name)

    def _stop(self, reason: str) -> None:
        self.reasons.append(reason)
        with suppress(RuntimeError):  # the signal interrupted just such a line, and Python refuses to reenter
            self.say(f"{reason}: {ONCE}")

    def _leave_terminal(self) -> None:
        """Send output to /dev/null instead of a terminal that is gone, where writing is an error."""
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self.terminals:
            os.dup2(null, descriptor)
        os.close(null)
