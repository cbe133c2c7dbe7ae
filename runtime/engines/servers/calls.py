"""Requests in flight to several servers: sent, sent again where a server is lost, aborted.

They run on an event loop of a thread of their own, so that any thread may send some while others wait.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar
from uuid import uuid4

from rlgraph.errors import RunError
from rlgraph.ops.interfaces import Enough
from rlgraph.runtime.engines.servers.asks import Ask, InFlight, events
from rlgraph.runtime.engines.servers.endpoint import REPLY, Endpoint
from rlgraph.runtime.engines.servers.lost import LostServers
from rlgraph.runtime.engines.servers.router import Router
from rlgraph.runtime.engines.servers.supervisor import Supervisor

SWEEP = 0.1  # seconds between rounds of aborts
MOMENT = 1.0  # seconds after which a call comes back whose samples go on
LOOK = 0.02  # seconds after which ``enough`` is asked again
SWEEPS = 300  # rounds of aborts after which a request is given up: a paused server never saw it
LATE = 408  # HTTP's status of a request that took too long
T = TypeVar("T")


class Calls:
    """Requests in flight between an engine and its servers."""

    def __init__(
        self,
        clients: Sequence[Endpoint],
        limit: int,
        patience: float,
        wanted: Callable[[], int],
        supervisor: Supervisor[Any] | None,
        request_timeout: float = REPLY,
        request_retries: int = 120,
    ) -> None:
        """Start with nothing in flight.

        Args:
            clients: the servers; any of them may answer any request.
            limit: requests in flight on one of them; the others wait here.
            patience: seconds in which one of them has to be up again with these weights, once none is.
            wanted: the version of weights that a server has to have that comes back.
            supervisor: of a server, where this process started one.
            request_timeout, request_retries: as ``models.NAME.serve``.
        """
        self.timeout, self.retries = request_timeout, request_retries
        self.clients, self.router = clients, Router(len(clients), limit)
        self.lost = LostServers(clients, self.router, patience, wanted, supervisor, self._all_may_look)
        self.asks: set[Ask] = set()
        self.staying: dict[Ask, asyncio.Task[list[dict[str, Any]]]] = {}  # what goes on in the next call
        self.left: dict[tuple[int, ...], list[Any]] = {}  # samples that go on, by the tokens that are told
        self.begun = count()  # numbers of batches of samples
        self.flying: dict[str, InFlight] = {}  # the keys are request ids
        self.tasks: set[asyncio.Task[None]] = set()  # nobody waits for them
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self._wait(self._open())

    def run(
        self,
        asks: Sequence[Ask],
        enough: Enough | None = None,
        requests: Sequence[int] = (),
        stay: bool = False,
    ) -> list[list[dict[str, Any]]]:
        """Send requests and wait for all; of each its reply, or nothing if it was aborted before it was sent.

        ``enough`` is told of which replies are here, by the place of each one's request in ``requests``; once
        it says so the others are aborted. Those that ``stay`` go on instead, then or after a moment; what of
        them is known is returned. The next such call may give them again, and aborts what it does not.

        Raises:
            RunError: a server refused one.
            ServerLostError: no server is left.
        """
        return self._wait((self._some if stay else self._all)(asks, enough, requests))

    def abort(self, staying: bool = False) -> None:
        """End early what is in flight, or what of it stays between calls; wait until it has come back."""
        self._wait(self._abort([ask for ask in {*self.asks} if ask.stays or not staying]))

    def hold(self, servers: Collection[int], version: int) -> None:
        """Have nothing in flight at these servers alone, which are to get weights, until the next call.

        What is there comes back as far as it is, and waits to go on.
        """
        self._wait(self._hold({*servers}, version))

    def leave_out(self) -> None:
        """Leave servers out that do not have the weights that are wanted, until they do."""
        self._wait(self.lost.leave_out())

    def close(self) -> None:
        """End the connections and the thread."""
        if not self.loop.is_closed():
            self._wait(self._close())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _open(self) -> None:
        import aiohttp

        self.freed, self.losses = asyncio.Condition(), (aiohttp.ClientError, OSError)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.timeout)
        self.session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def _close(self) -> None:
        running = [*self.tasks, *self.staying.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(self.lost.close(), *running, return_exceptions=True)
        await self.session.close()

    async def _all(
        self, asks: Sequence[Ask], enough: Enough | None, requests: Sequence[int]
    ) -> list[list[dict[str, Any]]]:
        self.asks |= {*asks}
        replies = [asyncio.ensure_future(self._one(ask)) for ask in asks]
        try:
            if enough and await self._will_do(dict(zip(replies, requests, strict=True)), enough):
                await self._abort(asks)
            return await asyncio.gather(*replies)
        finally:
            for task in replies:
                task.cancel()
            self._over(asks)

    def _over(self, asks: Sequence[Ask]) -> None:
        """Forget requests that nothing comes of any more."""
        self.asks -= {*asks}
        self.router.forget(ask.conversation for ask in asks if isinstance(ask.conversation, tuple))

    async def _some(
        self, asks: Sequence[Ask], enough: Enough | None, requests: Sequence[int]
    ) -> list[list[dict[str, Any]]]:
        earlier, self.staying = self.staying, {ask: self.staying.get(ask) or self._stay(ask) for ask in asks}
        self._later(self._abort(earlier.keys() - self.staying.keys()))
        replies = [*self.staying.values()]
        with suppress(TimeoutError):
            async with asyncio.timeout(MOMENT):
                await self._will_do(dict(zip(replies, requests, strict=True)), enough or (lambda _: False))
        return [task.result() if task.done() else [*ask.pieces] for ask, task in self.staying.items()]

    def _stay(self, ask: Ask) -> asyncio.Task[list[dict[str, Any]]]:
        """Send a request that goes on whether a call waits for it or not."""
        ask.stays, task = True, asyncio.ensure_future(self._one(ask))
        self.asks.add(ask)

        def ended(task: asyncio.Task[list[dict[str, Any]]]) -> None:
            self._over([ask])
            _ = task.cancelled() or task.exception()  # it is raised where somebody asks for the sample

        task.add_done_callback(ended)
        return task

    async def _will_do(self, replies: dict[asyncio.Future[Any], int], enough: Enough) -> bool:
        """Wait until there are enough replies; return False where all are here before, or one failed."""
        pending = {*replies}
        while pending:
            ended, pending = await asyncio.wait(pending, timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() for task in ended):
                return False
            if enough([replies[task] for task in ended]):
                return True
        return False

    async def _one(self, ask: Ask) -> list[dict[str, Any]]:
        """Return the reply to a request, behind what was known of it from servers that were lost."""
        tries = 0
        while (server := await self._place(ask)) is not None:
            ask.held = False
            if (reply := await self._reply(ask, server)) is None:
                continue
            (status, text), client = reply, self.clients[server]
            if status in (LATE, *client.busy) and (ask.aborted or (tries := tries + 1) <= self.retries):
                if status != LATE:
                    self.lost.add(server)
                continue
            if status != 200 and not client.lacks_weights(text):
                raise RunError(f"the {client.title} at {client.url} answered {status}: {text[:500]}")
            if text:  # it was not streamed
                answer: dict[str, Any] = json.loads(text)
                if weights := client.own_weights(answer):
                    self.lost.add(server, weights)  # started anew; it has yet to be brought to these weights
                    continue
                ask.pieces.append(answer)
            if ask.aborted or not ask.held or not client.is_left(ask):
                return ask.pieces
            ask.pieces = ask.pieces if ask.is_cut else []
        return ask.pieces

    async def _reply(self, ask: Ask, server: int) -> tuple[int, str] | None:
        """Return status and text of a server's reply; None where it is lost, or the request was aborted."""
        request, client = uuid4().hex, self.clients[server]
        known = [token for piece in ask.pieces for token in client.tokens(piece)]
        body = ask.behind(known) if ask.behind else ask.body
        reply = asyncio.ensure_future(self._post(server, client.generates, client.asked(request, body), ask))
        self.flying[request] = InFlight(ask, server, reply)
        try:
            return await reply
        except TimeoutError:
            await self._stop(request, self.flying[request])
            ask.late = server
            return LATE, f"no sample in {self.timeout:g} s (serve.request_timeout), {self.retries + 1} times"
        except self.losses:
            self.lost.add(server)
        except asyncio.CancelledError:
            if not (ask.aborted or ask.held):
                raise
        finally:
            reply.cancel()
            del self.flying[request]
            await self._give_back(server)
        return None

    async def _post(
        self, server: int, call: str, body: dict[str, Any], ask: Ask | None = None
    ) -> tuple[int, str]:
        client = self.clients[server]
        # the session's limit is one per read, which is right for a stream alone
        async with (
            asyncio.timeout(self.timeout) as limit,
            self.session.post(f"{client.url}/{call}", json=body, headers=client.headers) as reply,
        ):
            if ask is None or reply.content_type != "text/event-stream":
                return reply.status, await reply.text()
            limit.reschedule(None)
            return await client.heard(ask, events(reply.content))

    async def _place(self, ask: Ask) -> int | None:
        """Return the server that takes a request, once there is one; None if it was aborted before."""
        async with self.freed:
            while not ask.aborted:
                if self.lost.error:
                    raise self.lost.error
                server = self.router.take(ask.conversation, ask.late)
                if server is not None:
                    return server
                await self.freed.wait()
        return None

    async def _give_back(self, server: int) -> None:
        self.router.give_back(server)
        async with self.freed:
            self.freed.notify(len(self.asks) if self.router.held else 1)  # some may have to wait on

    async def _all_may_look(self) -> None:
        async with self.freed:
            self.freed.notify_all()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _abort(self, asks: Iterable[Ask]) -> None:
        wanted = {*asks}
        for ask in wanted:
            ask.aborted = True
        await self._all_may_look()
        await self._land(lambda flight: flight.ask in wanted)

    async def _hold(self, servers: set[int], version: int) -> None:
        self.router.held = servers
        for ask in self.asks:
            ask.versions.add(version)
        for flight in self.flying.values():
            flight.ask.held |= flight.server in servers
        await self._all_may_look()
        await self._land(lambda flight: flight.server in servers)

    async def _land(self, wanted: Callable[[InFlight], bool]) -> None:
        """End requests that are sent, and wait until they have come back."""
        rounds = count()
        while flights := [(request, flight) for request, flight in self.flying.items() if wanted(flight)]:
            # repeated: a request on its way is not known to its server yet
            await asyncio.gather(*(self._stop(request, flight) for request, flight in flights))
            if next(rounds) > SWEEPS:
                for _, flight in flights:
                    flight.reply.cancel()
            await asyncio.wait([flight.reply for _, flight in flights], timeout=SWEEP)
            await asyncio.sleep(0)

    async def _stop(self, request: str, flight: InFlight) -> None:
        if (call := self.clients[flight.server].abortion(request)) is None:
            flight.reply.cancel()
            return
        try:
            await self._post(flight.server, *call)
        except self.losses:
            self.lost.add(flight.server)
