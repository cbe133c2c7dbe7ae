"""Supervision of a server that this process started: one that is lost is started anew.

What a server is brought to then, such as its weights, is for an engine's own supervisor to say (``restore``).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic

from rlgraph.errors import RunError
from rlgraph.runtime.engines.servers.process import EndedError, Server, ServerClient
from rlgraph.runtime.messages.errors import ServerLostError

START, BLINK = 600.0, 0.5  # seconds in which a server has to be up, and between looks at whether it runs
PORTS = 5  # most ports to try, where other programs take one while the server starts


class Supervisor(ABC, Generic[ServerClient]):
    """Keeps the server that it started, in a thread that watches it.

    ``sleeping`` are its components that sleep: such a server is not started anew before it is woken, since
    until then others have its memory. Who changes it holds ``lock``.
    """

    def __init__(self, restarts: int, timeout: float = START) -> None:
        """Start a server and wait until it answers.

        Args:
            restarts: how often one that is lost is started anew.
            timeout: seconds in which it has to be up.

        Raises:
            RunError: it does not come up: with its last lines.
        """
        self.left = self.restarts = restarts
        self.timeout = timeout
        self.sleeping = frozenset[str]()
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.closing = threading.Event()
        self.failed: RunError | None = None
        self.server = self._start_first()
        self.client = self.server.client
        self.notes = [*filter(None, [self.shortage()])]
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    @abstractmethod
    def begin(self, predecessor: Server[ServerClient] | None = None) -> Server[ServerClient]:
        """Start a server, at the place of one that is lost where there is one."""

    @abstractmethod
    def restore(self) -> None:
        """Bring a new server to the state that was wanted of the one before."""

    @abstractmethod
    def shortage(self) -> str:
        """Return what the server has less of than the plan counts, as a sentence; "" where it has all."""

    def close(self) -> None:
        """End the server."""
        self.closing.set()
        with self.lock:
            self.server.close()
            self.server.port.close()
        self.watch.join()

    def tried(self, action: Callable[[], None]) -> bool:
        """Carry out an action, and return whether it was: not, where the server is lost."""
        try:
            action()
        except ServerLostError:
            return False
        return True

    def renew(self) -> None:
        """Start a new server in the place of one that is lost, in the state that was wanted of it.

        Raises:
            ServerLostError: it was lost more often than it may be, or the new one is not up in time.
        """
        is_restored = False
        while not is_restored:
            law = self.server.obituary()
            self.server.close()
            if not self.left:
                used = f"{self.restarts} restarts were used up" if self.restarts else "it is not started anew"
                raise ServerLostError(f"{law}; {used} (restarts){self.server.last_lines()}")
            self.left -= 1
            self._note(f"{law}; started anew, which may happen {self.left} times more")
            self.server = self.begin(self.server)
            try:
                self.server.wait(self.timeout)
            except EndedError:  # that counts, too
                continue
            except RunError as error:  # others may hold its memory: new workers begin without them
                raise ServerLostError(str(error)) from error
            if short := self.shortage():
                self._note(short)
            is_restored = self.tried(self.restore)

    def _start_first(self) -> Server[ServerClient]:
        """Return a server that answers, on the first port that nobody takes while it starts."""
        for tries_left in reversed(range(PORTS)):
            server = self.begin()
            try:
                server.wait(self.timeout)
                return server
            except RunError:
                server.port.close()
                if not tries_left or not server.has_lost_its_port():
                    raise
        raise AssertionError

    def _watch(self) -> None:
        """Start a server anew that ends while nothing is asked of it but to generate."""
        while not self.closing.wait(BLINK):
            with self.lock:
                if self.closing.is_set() or self.sleeping or self.server.is_alive():
                    continue
                try:
                    self.renew()
                except RunError as error:
                    self.failed = error
                    return

    def _note(self, law: str) -> None:
        """Write a line of ours into the server's log."""
        with self.server.log.open("a", encoding="utf-8") as log:
            log.write(f"rlgraph: {law}\n")
