"""Servers that are lost: they do not answer, or have other weights than are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlgraph.errors import RunError
from rlgraph.runtime.engines.servers.endpoint import Endpoint
from rlgraph.runtime.engines.servers.router import Router
from rlgraph.runtime.engines.servers.supervisor import Supervisor
from rlgraph.runtime.messages.errors import ServerLostError

BLINK = 0.5  # seconds between looks at a lost server


class LostServers:
    """Takes lost servers from the router, and looks for each until it is back, on the loop of who calls."""

    def __init__(
        self,
        clients: Sequence[Endpoint],
        router: Router,
        patience: float,
        wanted: Callable[[], int],
        supervisor: Supervisor[Any] | None,
        over: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Start with none lost; ``over`` is run when one is back, or none will be. Others are as of Calls."""
        self.clients = clients
        self.router = router
        self.patience = patience
        self.over = over
        self.wanted = wanted
        self.supervisor = supervisor
        self.error: RunError | None = None  # once there is no hope
        self.last_versions: dict[int, str | None] = {}  # the weights that a server had last; None: no answer
        self.seeking: set[asyncio.Task[None]] = set()
        self.glances = ThreadPoolExecutor(len(clients))

    async def leave_out(self) -> None:
        """Take those for lost that have not the weights that are wanted now."""
        up = sorted(self.router.up)
        for server, has_them in zip(up, await asyncio.gather(*map(self._is_back, up)), strict=True):
            if not has_them:
                self.add(server, self.last_versions.get(server))

    def add(self, server: int, version: str | None = None) -> None:
        """Note that a server does not answer, or has these weights in place of those that are wanted."""
        self.last_versions[server] = version
        if self.router.lose(server):
            task = asyncio.ensure_future(self._seek(server))
            self.seeking.add(task)
            task.add_done_callback(self.seeking.discard)

    async def close(self) -> None:
        """Look for none any more."""
        for task in self.seeking:
            task.cancel()
        await asyncio.gather(*self.seeking, return_exceptions=True)
        self.glances.shutdown()

    async def _seek(self, server: int) -> None:
        """Look for a lost server until it is back with the weights that are wanted, or there is no hope."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.patience
        while not self.error:
            await asyncio.sleep(BLINK)
            if await self._is_back(server):
                self.router.find(server)
                break
            if not self.router.up and loop.time() > end:
                self.error = ServerLostError(self._hopeless())
        await self.over()

    def _hopeless(self) -> str:
        """Return the message that no server has the weights that are wanted, and what each has."""
        law = f"no {self.clients[0].title} answers any more with weights {self.wanted()}, "
        law += f"after {self.patience:g} s"
        for server, has in sorted(self.last_versions.items()):
            state = f"has weights {has}" if has else "does not answer"
            law += f"\n  {self.clients[server].url} {state}"
        return law

    async def _is_back(self, server: int) -> bool:
        if self.supervisor and self.supervisor.failed:
            self.error = self.supervisor.failed
        version = self.clients[server].version
        try:
            version_there = await asyncio.get_running_loop().run_in_executor(self.glances, version)
        except RunError as error:
            self.error = error
            return False
        self.last_versions[server] = version_there
        return version_there == str(self.wanted())
