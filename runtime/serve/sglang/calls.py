"""Requests in flight to several servers: sent, sent again where a server is lost, aborted.

They run on an event loop of a thread of their own, so that any thread may send some while others wait.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

from rlgraph.engines import Enough
from rlgraph.errors import RunError
from rlgraph.runtime.serve.sglang.client import FIRST, REPLY, Client, ServerLostError
from rlgraph.runtime.serve.sglang.router import Router

if TYPE_CHECKING:
    import aiohttp

BLINK, SWEEP = 0.5, 0.1  # seconds between looks at a lost server, and between rounds of aborts
T = TypeVar("T")


@dataclass(eq=False)
class Ask:
    """One sample that is asked for.

    Attributes:
        body: of the call.
        conversation: its key, if it has one.
        versions: of weights that its tokens may be of.
        aborted: whether what there is of it is wanted back.
    """

    body: dict[str, Any]
    conversation: str | None
    versions: set[int] = field(default_factory=set)
    aborted: bool = False


class Doubt(Protocol):
    """Where it can be seen that a server will not come back."""

    failed: RunError | None


class Calls:
    """What is in flight between an engine and its servers."""

    def __init__(
        self,
        clients: Sequence[Client],
        limit: int,
        patience: float,
        wanted: Callable[[], int],
        keeper: Doubt | None,
    ) -> None:
        """Nothing in flight.

        Args:
            clients: the servers; any of them may answer any request.
            limit: requests in flight on one of them; the others wait here.
            patience: seconds in which one of them has to be up again with these weights, once none is.
            wanted: the version of weights that a server has to have that comes back.
            keeper: of a server, where this process looks after one.
        """
        self.clients, self.patience, self.wanted, self.keeper = clients, patience, wanted, keeper
        self.router = Router(len(clients), limit)
        self.asks: set[Ask] = set()
        self.flying: dict[str, tuple[Ask, int]] = {}  # by request id: what was sent where
        self.error: RunError | None = None
        self.seeking: set[asyncio.Task[None]] = set()
        self.found: dict[int, str | None] = {}  # the weights that a server had last; None: no answer
        self.glances = ThreadPoolExecutor(len(clients))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self._wait(self._open())

    def run(
        self, asks: Sequence[Ask], enough: Enough | None = None, requests: Sequence[int] = ()
    ) -> list[dict[str, Any] | None]:
        """Send requests and wait for all; of each its reply, or None if it was aborted before it was sent.

        Args:
            asks: to send.
            enough: told of which of ``requests`` replies are here; once it says so the others are aborted.
            requests: the place of each one's request.

        Raises:
            RunError: a server refused one.
            ServerLostError: no server is left.
        """
        return self._wait(self._all(asks, enough, requests))

    def abort(self) -> None:
        """Have all that is in flight come back with what there is of it; wait until it has."""
        self._wait(self._abort())

    def promise(self, version: int) -> None:
        """What is in flight may get tokens of these weights too. A server is left out until it has them."""
        for ask in list(self.asks):
            ask.versions.add(version)
        self._wait(self._leave_out())

    def close(self) -> None:
        """End the connections and the thread."""
        if not self.loop.is_closed():
            self._wait(self._close())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
            self.glances.shutdown()

    def _wait(self, made: Awaitable[T]) -> T:
        async def run() -> T:
            return await made

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()

    async def _open(self) -> None:
        import aiohttp

        self.freed = asyncio.Condition()
        timeout = aiohttp.ClientTimeout(total=None, sock_read=REPLY)
        self.session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def _close(self) -> None:
        for task in self.seeking:
            task.cancel()
        await self.session.close()

    async def _all(
        self, asks: Sequence[Ask], enough: Enough | None, requests: Sequence[int]
    ) -> list[dict[str, Any] | None]:
        self.asks |= {*asks}
        made = [asyncio.ensure_future(self._one(ask)) for ask in asks]
        try:
            if enough and await self._will_do(dict(zip(made, requests, strict=True)), enough):
                await self._abort(asks)
            return await asyncio.gather(*made)
        finally:
            for task in made:
                task.cancel()
            self.asks -= {*asks}

    async def _will_do(self, made: dict[asyncio.Future[Any], int], enough: Enough) -> bool:
        """Wait until there are enough replies; False where all are here before, or one failed."""
        rest = {*made}
        while rest:
            done, rest = await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() for task in done):
                return False
            if enough([made[task] for task in done]):
                return True
        return False

    async def _one(self, ask: Ask) -> dict[str, Any] | None:
        """The reply to a request, from the first server that gives one."""
        import aiohttp

        while (server := await self._place(ask)) is not None:
            rid = uuid4().hex
            self.flying[rid] = ask, server
            try:
                async with self._post(server, "generate", {"rid": rid, **ask.body}) as reply:
                    text = await reply.text()
            except (aiohttp.ClientError, OSError):
                self._lost(server)
                continue
            finally:
                del self.flying[rid]
                await self._give_back(server)
            if reply.status != 200:
                law = f"the SGLang server at {self.clients[server].url} answered {reply.status}"
                raise RunError(f"{law}: {text[:500]}")
            answer: dict[str, Any] = json.loads(text)
            if answer["meta_info"]["weight_version"] != FIRST:
                return answer
            self._lost(server, FIRST)  # started anew; it has yet to be brought to the promised weights
        return None

    def _post(self, server: int, call: str, body: dict[str, Any]) -> aiohttp.client._RequestContextManager:
        client = self.clients[server]
        return self.session.post(f"{client.url}/{call}", json=body, headers=client.headers)

    async def _place(self, ask: Ask) -> int | None:
        """The server that takes a request, once there is one; None if it was aborted before."""
        async with self.freed:
            while not ask.aborted:
                if self.error:
                    raise self.error
                server = self.router.take(ask.conversation)
                if server is not None:
                    return server
                await self.freed.wait()
        return None

    async def _give_back(self, server: int) -> None:
        self.router.give_back(server)
        async with self.freed:
            self.freed.notify()

    async def _all_may_look(self) -> None:
        async with self.freed:
            self.freed.notify_all()

    async def _leave_out(self) -> None:
        up = sorted(self.router.up)
        for server, has_them in zip(up, await asyncio.gather(*map(self._is_back, up)), strict=True):
            if not has_them:
                self._lost(server, self.found.get(server))

    def _lost(self, server: int, version: str | None = None) -> None:
        """A server does not answer, or has these weights in place of those that are wanted."""
        self.found[server] = version
        if self.router.lose(server):
            task = asyncio.ensure_future(self._seek(server))
            self.seeking.add(task)
            task.add_done_callback(self.seeking.discard)

    async def _seek(self, server: int) -> None:
        """Look for a lost server until it is back with the weights that are wanted, or there is no hope."""
        end = self.loop.time() + self.patience
        while not self.error:
            await asyncio.sleep(BLINK)
            if await self._is_back(server):
                self.router.find(server)
                break
            if not self.router.up and self.loop.time() > end:
                self.error = ServerLostError(self._hopeless())
        await self._all_may_look()

    def _hopeless(self) -> str:
        """That no server has the weights that are wanted, and what each has."""
        law = f"no SGLang server answers any more with weights {self.wanted()}, after {self.patience:g} s"
        for server, has in sorted(self.found.items()):
            law += f"\n  {self.clients[server].url} {f'has weights {has}' if has else 'does not answer'}"
        return law

    async def _is_back(self, server: int) -> bool:
        if self.keeper and self.keeper.failed:
            self.error = self.keeper.failed
        try:
            there = await self.loop.run_in_executor(self.glances, self.clients[server].version)
        except RunError as error:
            self.error = error
            return False
        self.found[server] = there
        return there == str(self.wanted())

    async def _abort(self, asks: Iterable[Ask] | None = None) -> None:
        wanted = {*(self.asks if asks is None else asks)}
        for ask in wanted:
            ask.aborted = True
        await self._all_may_look()
        while any(ask in wanted for ask, _ in self.flying.values()):
            # again and again: one that is on its way is not known to its server yet
            sent = [(rid, server) for rid, (ask, server) in self.flying.items() if ask in wanted]
            await asyncio.gather(*(self._stop(rid, server) for rid, server in sent))
            await asyncio.sleep(SWEEP)

    async def _stop(self, rid: str, server: int) -> None:
        import aiohttp

        try:
            async with self._post(server, "abort_request", {"rid": rid}) as reply:
                await reply.read()
        except (aiohttp.ClientError, OSError):
            self._lost(server)
