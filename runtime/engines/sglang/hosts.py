"""A server over several hosts: a process on each of them, which begin and end together.

The first host's process answers over HTTP; those of the others compute with their devices. Each start has a
number. The worker that leads writes it into a store, with the address where the processes meet, and on every
other host a worker begins the process of that start in place of an earlier one. A process that ends is
written there too; then the first host's is ended, which is so lost as a whole and started anew.

    store    starts  2      2  "10.0.0.1:30017"      lost-2  "the SGLang server ... ended (signal SIGKILL)"
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rlgraph.runtime.engines.servers.ports import ServerPort
from rlgraph.runtime.engines.servers.process import Server
from rlgraph.runtime.engines.servers.supervisor import BLINK
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.sglang.launch import Launch
from rlgraph.runtime.messages.address import host_port

ANSWER = timedelta(seconds=30)  # in which the worker that leads has to take a connection


@dataclass
class Starts:
    """The starts of one server, as each of its hosts sees them.

    Attributes:
        hosts: how many it spans.
        node: which of them this is; the first holds the store.
        address: of the first host, where all others reach it.
        port: of the store; 0 on the first host: one that is free.
    """

    hosts: int
    node: int
    address: str
    port: int = 0

    def __post_init__(self) -> None:
        is_first = self.node == 0
        self.store = dist.TCPStore(
            self.address, self.port, is_master=is_first, timeout=ANSWER, wait_for_workers=False
        )
        self.port = self.store.port

    def begin(self, meeting: str) -> int:
        """Tell all hosts to begin anew, and where they meet; return the number of this start."""
        number = self.latest() + 1
        self.store.set(str(number), meeting)
        return int(self.store.add("starts", 1))

    def latest(self) -> int:
        """Return the number of the last start, 0 of none."""
        return int(self.store.add("starts", 0))

    def meeting(self, number: int) -> str:
        """Return the address where the processes of a start meet."""
        return str(self.store.get(str(number)).decode())

    def lose(self, number: int, why: str) -> None:
        """Say that this host's process of a start has ended."""
        self.store.set(f"lost-{number}", why)

    def lost(self, number: int) -> str:
        """Return why a process of a start has ended on another host; "" where all run."""
        key = f"lost-{number}"
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""


class FirstServer(Server[Client]):
    """The process on the first host, which ends as soon as one of another host has."""

    def __init__(
        self,
        launch: Launch,
        logs: Path,
        devices: Sequence[str],
        host: str,
        predecessor: Server[Client] | None,
        starts: Starts,
    ) -> None:
        """Start it, and those of the other hosts; ``wait`` says when they answer."""
        self.starts = starts
        self.meets = ServerPort(host)
        meeting = host_port(host, self.meets.number)
        self.number = starts.begin(meeting)
        super().__init__(
            replace(launch, hosts=starts.hosts, meeting=meeting), logs, devices, host, predecessor
        )
        threading.Thread(target=self._watch, daemon=True).start()

    def obituary(self) -> str:
        """Return how it ended, or which process of another host did before it."""
        return self.starts.lost(self.number).partition("\n")[0] or super().obituary()

    def last_lines(self) -> str:
        """Return the end of its log, and before it that of another host's process that has ended."""
        return self.starts.lost(self.number).removeprefix(self.obituary()) + super().last_lines()

    def close(self) -> None:
        """End it; the other hosts' end as another start begins, or with their workers."""
        super().close()
        self.meets.close()

    def _watch(self) -> None:
        while not self.closed and self.is_alive():
            if self.starts.lost(self.number):
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                return
            threading.Event().wait(BLINK)


class Follower:
    """Keeps the process of another host than the first: one for each start."""

    def __init__(self, launch: Launch, logs: Path, devices: Sequence[str], host: str, starts: Starts) -> None:
        """Wait for the first start, in a thread; see ``Server`` for what else is given."""
        self.launch = replace(launch, hosts=starts.hosts, node=starts.node)
        self.place = (logs, devices, host)
        self.starts = starts
        self.server: Server[Client] | None = None
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End the process."""
        self.closing.set()
        self.thread.join()

    def _follow(self) -> None:
        number = 0
        with suppress(dist.DistError):  # the worker that leads is gone: nobody uses this process any more
            while not self.closing.wait(BLINK):
                if (latest := self.starts.latest()) > number:
                    number = latest
                    self._begin(number)
                elif self.server:
                    self._look(self.server, number)
        if self.server:
            self.server.close()
            self.server.port.close()

    def _begin(self, number: int) -> None:
        if self.server:
            self.server.close()
        launch = replace(self.launch, meeting=self.starts.meeting(number))
        self.server = Server(launch, *self.place, self.server)

    def _look(self, server: Server[Client], number: int) -> None:
        """Tell where its process has ended; forget what it has read, which may hold keys."""
        if server.closed:
            return
        if not server.is_alive():
            server.close()
            self.starts.lose(number, f"{server.obituary()} on {self.place[-1]}{server.last_lines()}")
        elif server.configuration.exists() and server.client.is_healthy():
            server.unlink_files()
