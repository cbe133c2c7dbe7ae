"""Requests in flight to several servers: sent, sent again where a server is lost, aborted.

They run on an event loop in a thread, so that any thread may send some while others wait.
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
from rlgraph.runtime.engines.servers.endpoint import REPLY, Endpoint
from rlgraph.runtime.engines.servers.lost import LostServers
from rlgraph.runtime.engines.servers.router import Router
from rlgraph.runtime.engines.servers.sample_request import InFlight, SampleRequest, events
from rlgraph.runtime.engines.servers.supervisor import Supervisor

ABORT_INTERVAL = 0.1  # seconds between rounds of aborts
MAX_ABORTS = 300  # rounds of aborts after which a request is given up: a paused server never saw it
STAY_SECONDS = 1.0  # after which a call returns whose samples go on
POLL_INTERVAL = 0.02  # seconds after which ``enough`` is asked again
TIMED_OUT = 408  # HTTP's status of a request that took too long
T = TypeVar("T")
Reply = list[dict[str, Any]]  # the chunks of a reply, one where it is not streamed


class Calls:
    """Requests in flight between an engine and its servers.

    Invariants:
        - All state is changed on the event loop alone; other threads go through ``_wait``.
        - ``unanswered`` has the requests that nothing was returned for yet; ``staying`` those of them that go
          on between calls, each with the task that waits for its reply.
        - ``flying`` has the HTTP requests that were sent; a request to be sent again has none meanwhile.
        - The router counts each request that was sent until ``_give_back``.
    """

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
        self.timeout = request_timeout
        self.retries = request_retries
        self.clients = clients
        self.router = Router(len(clients), limit)
        self.lost = LostServers(clients, self.router, patience, wanted, supervisor, self._all_may_look)
        self.unanswered: set[SampleRequest] = set()
        self.staying: dict[SampleRequest, asyncio.Task[Reply]] = {}
        self.unfinished: dict[tuple[int, ...], list[Any]] = {}  # samples that go on, by their tokens so far
        self.batches = count()  # numbers of batches of samples
        self.flying: dict[str, InFlight] = {}  # the keys are request ids
        self.tasks: set[asyncio.Task[None]] = set()  # nobody waits for them
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self._wait(self._open())

    def run(
        self,
        sample_requests: Sequence[SampleRequest],
        enough: Enough | None = None,
        requests: Sequence[int] = (),
        stay: bool = False,
    ) -> list[Reply]:
        """Send requests and wait for all.

        Args:
            asks: what to send.
            enough: called with the numbers of requests whose replies have come; once it returns True, the
                others are aborted.
            requests: the number of the request that each of the ``sample_requests`` belongs to.
            stay: whether the others go on instead, then or after ``STAY_SECONDS``. The next such call may ask
                for them again, and aborts those that it does not.

        Returns:
            for each request the chunks of its reply that have come; nothing if it was aborted before it was
            sent.

        Raises:
            RunError: a server refused one.
            ServerLostError: no server is left.
        """
        if stay:
            return self._wait(self._run_staying(sample_requests, enough, requests))
        return self._wait(self._run_all(sample_requests, enough, requests))

    def abort(self, staying: bool = False) -> None:
        """Abort the requests in flight, or with ``staying`` those that go on between calls; wait for them."""
        chosen = [
            sample_request
            for sample_request in {*self.unanswered}
            if sample_request.outlives_call or not staying
        ]
        self._wait(self._abort(chosen))

    def hold(self, servers: Collection[int], version: int) -> None:
        """Have nothing in flight at these servers, which are to get weights, until the next call.

        Their requests come back as far as they are, and wait to go on.
        """
        self._wait(self._hold({*servers}, version))

    def leave_out(self) -> None:
        """Send nothing to servers that do not have the wanted weights, until they do."""
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

        self.freed = asyncio.Condition()  # notified when a request may find a server
        self.losses = (aiohttp.ClientError, OSError)  # errors that mean that a server is lost
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.timeout)
        self.session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def _close(self) -> None:
        running = [*self.tasks, *self.staying.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(self.lost.close(), *running, return_exceptions=True)
        await self.session.close()

    async def _run_all(
        self, sample_requests: Sequence[SampleRequest], enough: Enough | None, requests: Sequence[int]
    ) -> list[Reply]:
        self.unanswered |= {*sample_requests}
        replies = [
            asyncio.ensure_future(self._complete(sample_request)) for sample_request in sample_requests
        ]
        try:
            if enough:
                request_of_reply = dict(zip(replies, requests, strict=True))
                if await self._are_enough(request_of_reply, enough):
                    await self._abort(sample_requests)
            return await asyncio.gather(*replies)
        finally:
            for reply in replies:
                reply.cancel()
            self._forget(sample_requests)

    def _forget(self, sample_requests: Sequence[SampleRequest]) -> None:
        """Forget requests that have ended."""
        self.unanswered -= {*sample_requests}
        self.router.forget(
            sample_request.conversation
            for sample_request in sample_requests
            if isinstance(sample_request.conversation, tuple)
        )

    async def _run_staying(
        self, sample_requests: Sequence[SampleRequest], enough: Enough | None, requests: Sequence[int]
    ) -> list[Reply]:
        earlier = self.staying
        self.staying = {
            sample_request: earlier.get(sample_request) or self._stay(sample_request)
            for sample_request in sample_requests
        }
        self._in_background(self._abort(earlier.keys() - self.staying.keys()))
        request_of_reply = dict(zip(self.staying.values(), requests, strict=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(STAY_SECONDS):
                await self._are_enough(request_of_reply, enough or (lambda _: False))
        replies = []
        for sample_request, task in self.staying.items():
            replies.append(task.result() if task.done() else [*sample_request.chunks])
        return replies

    def _stay(self, sample_request: SampleRequest) -> asyncio.Task[Reply]:
        """Send a request that goes on whether a call waits for it or not."""
        sample_request.outlives_call = True
        task = asyncio.ensure_future(self._complete(sample_request))
        self.unanswered.add(sample_request)

        def ended(task: asyncio.Task[Reply]) -> None:
            self._forget([sample_request])
            if not task.cancelled():
                task.exception()  # marks it as seen: it is raised where a call asks for the sample

        task.add_done_callback(ended)
        return task

    async def _are_enough(self, request_of_reply: dict[asyncio.Task[Reply], int], enough: Enough) -> bool:
        """Wait until there are enough replies; return False where all have come, or one failed, by then."""
        pending = {*request_of_reply}
        while pending:
            ended, pending = await asyncio.wait(
                pending, timeout=POLL_INTERVAL, return_when=asyncio.FIRST_COMPLETED
            )
            if any(task.exception() for task in ended):
                return False
            if enough([request_of_reply[task] for task in ended]):
                return True
        return False

    async def _complete(self, sample_request: SampleRequest) -> Reply:
        """Return the reply to a request, behind what was known of it from servers that were lost.

        It is sent until a server has answered it whole, or it is aborted.
        """
        tries = 0
        while True:
            # 1. Send it to a server that has room.
            server = await self._free_server(sample_request)
            if server is None:  # it was aborted
                return sample_request.chunks
            client = self.clients[server]
            sample_request.is_paused = False
            reply = await self._reply(sample_request, server)
            if reply is None:
                continue
            status, text = reply

            # 2. Send it again where the server is busy or slow, so often.
            if status == TIMED_OUT or status in client.busy:
                if not sample_request.aborted:
                    tries += 1
                if sample_request.aborted or tries <= self.retries:
                    if status != TIMED_OUT:
                        self.lost.add(server)
                    continue
            if status != 200 and not client.lacks_weights(text):
                raise RunError(f"the {client.title} at {client.url} answered {status}: {text[:500]}")

            # 3. Take its answer, unless it is of other weights; a reply that was streamed is in the request.
            if text:
                answer: dict[str, Any] = json.loads(text)
                other_weights = client.own_weights(answer)
                if other_weights:  # the server was started anew, and has yet to get the wanted weights
                    self.lost.add(server, other_weights)
                    continue
                sample_request.chunks.append(answer)

            # 4. Go on where the server stopped early, as it was to get weights.
            was_stopped = (
                sample_request.is_paused and not sample_request.aborted and client.is_left(sample_request)
            )
            if not was_stopped:
                return sample_request.chunks
            if not sample_request.is_cut:
                sample_request.chunks = []

    async def _reply(self, sample_request: SampleRequest, server: int) -> tuple[int, str] | None:
        """Return status and text of a server's reply; None where it is lost, or the request was aborted."""
        request = uuid4().hex
        client = self.clients[server]
        body = sample_request.body
        if sample_request.continued_body:
            known_tokens = [token for chunk in sample_request.chunks for token in client.tokens(chunk)]
            body = sample_request.continued_body(known_tokens)
        reply = asyncio.ensure_future(
            self._post(server, client.generates, client.request_body(request, body), sample_request)
        )
        self.flying[request] = InFlight(sample_request, server, reply)
        try:
            return await reply
        except TimeoutError:
            await self._stop(request, self.flying[request])
            sample_request.slow_server = server
            text = f"no sample in {self.timeout:g} s (request_timeout), {self.retries + 1} times"
            return TIMED_OUT, text
        except self.losses:
            self.lost.add(server)
        except asyncio.CancelledError:
            if not (sample_request.aborted or sample_request.is_paused):
                raise
        finally:
            reply.cancel()
            del self.flying[request]
            await self._give_back(server)
        return None

    async def _post(
        self, server: int, call: str, body: dict[str, Any], sample_request: SampleRequest | None = None
    ) -> tuple[int, str]:
        client = self.clients[server]
        # the session's limit is one per read, which is right for a stream alone
        async with (
            asyncio.timeout(self.timeout) as limit,
            self.session.post(f"{client.url}/{call}", json=body, headers=client.headers) as reply,
        ):
            if sample_request is None or reply.content_type != "text/event-stream":
                return reply.status, await reply.text()
            limit.reschedule(None)
            return await client.receive(sample_request, events(reply.content))

    async def _free_server(self, sample_request: SampleRequest) -> int | None:
        """Return the server that takes a request, once there is one; None if it was aborted before."""
        async with self.freed:
            while not sample_request.aborted:
                if self.lost.error:
                    raise self.lost.error
                server = self.router.take(sample_request.conversation, sample_request.slow_server)
                if server is not None:
                    return server
                await self.freed.wait()
        return None

    async def _give_back(self, server: int) -> None:
        self.router.give_back(server)
        # a request that may not go to a held server waits on, so that another has to hear of this one
        waiters = len(self.unanswered) if self.router.paused else 1
        async with self.freed:
            self.freed.notify(waiters)

    async def _all_may_look(self) -> None:
        async with self.freed:
            self.freed.notify_all()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _abort(self, sample_requests: Iterable[SampleRequest]) -> None:
        aborted = {*sample_requests}
        for sample_request in aborted:
            sample_request.aborted = True
        await self._all_may_look()
        await self._land(lambda flight: flight.sample_request in aborted)

    async def _hold(self, servers: set[int], version: int) -> None:
        self.router.paused = servers
        for sample_request in self.unanswered:
            sample_request.versions.add(version)
        for flight in self.flying.values():
            flight.sample_request.is_paused |= flight.server in servers
        await self._all_may_look()
        await self._land(lambda flight: flight.server in servers)

    async def _land(self, is_chosen: Callable[[InFlight], bool]) -> None:
        """Have servers end requests that were sent, and wait until these have come back."""
        for abort_round in count():  # repeated: a request on its way is not known to its server yet
            flights = {request: flight for request, flight in self.flying.items() if is_chosen(flight)}
            if not flights:
                return
            await asyncio.gather(*(self._stop(request, flight) for request, flight in flights.items()))
            replies = [flight.reply for flight in flights.values()]
            if abort_round > MAX_ABORTS:
                for reply in replies:
                    reply.cancel()
            await asyncio.wait(replies, timeout=ABORT_INTERVAL)
            await asyncio.sleep(0)

    async def _stop(self, request: str, flight: InFlight) -> None:
        call = self.clients[flight.server].abortion(request)
        if call is None:
            flight.reply.cancel()
            return
        try:
            await self._post(flight.server, *call)
        except self.losses:
            self.lost.add(flight.server)
