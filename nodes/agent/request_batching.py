"""Request batching: many coroutines share one engine by ``await engine.generate(...)``.

An engine whose calls overlap gets each request as it comes. Any other engine gets them in rounds: one call
with all requests, when every conversation that goes on waits for it.

    tools     ──a── ──b────────         ──a──
    engine    ┌ a b c ┐        ┌ a b ┐        ┌ a ┐

So which requests share a call does not depend on how long a tool took, and a run can be had again bit for
bit.

Where conversations outlive a call of their op (``live_chats.py``), a round of such an engine is one call, of
some tokens for each: of all, or where rounds may depend on time of those that wait by then. Engines whose
calls overlap go on until they are to be still.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlgraph.nodes.rollout.partial import extended
from rlgraph.ops import Generation, Request, Sampling, ServeEngine

MOST = 2**14  # turns that are asked for at a time, of engines whose calls overlap
PATIENCE = 0.02  # seconds for which a call waits at least for conversations that don't wait for it yet
SWEEP = 0.1  # seconds between two aborts: of a call that has just begun an engine may not know yet


@dataclass(frozen=True)
class PendingRequest:
    """A request that waits, with its conversation and call, by which a round is sorted."""

    turn: tuple[int, int]
    request: Request
    sampling: Sampling
    answer: asyncio.Future[Generation]


class RequestBatcher:
    """Batches requests of one seed each.

    Invariants:
        - Of an engine whose calls overlap ``waiting`` is empty; of any other ``calls`` is.
        - While ``gate`` is closed no call begins on an engine whose calls overlap.
        - ``changed`` is set whenever a request was made or a conversation has ended.
    """

    def __init__(self, engine: ServeEngine, sampling: Sampling, chunk: int | None = None) -> None:
        """Start with no conversation. A round draws ``chunk`` tokens of a turn, or all of them."""
        self.engine, self.sampling = engine, sampling
        self.chunk = None if engine.overlaps else chunk
        self.going_on: set[int] = set()  # conversations
        self.waiting: list[PendingRequest] = []
        self.threads = ThreadPoolExecutor(MOST) if engine.overlaps else None
        self.calls: set[Future[list[list[Generation]]]] = set()  # of threads, in flight
        self.gate, self.changed = asyncio.Event(), asyncio.Event()  # changed: one asks, or is over
        self.gate.set()

    async def generate(
        self, turn: tuple[int, int], request: Request, sampling: Sampling | None = None
    ) -> Generation:
        """Return a request's answer; ``turn`` numbers its conversation and the call within that.

        Where a round or new weights cut it, it goes on behind the tokens that there are. It is drawn by the
        settings of all requests, unless it has a ``sampling`` of its own.
        """
        generation = Generation()
        sampling = sampling or self.sampling
        _, longest = request.limits(sampling)
        while True:
            remaining_tokens = longest - len(generation.tokens)
            limit = min(remaining_tokens, self.chunk or remaining_tokens)
            next_request = request.behind(generation.tokens, sampling)
            next_request = replace(next_request, max_new_tokens=limit)
            drawn = await self._draw_once(turn, next_request, sampling)
            generation = extended(generation, drawn, self.engine, sampling.stop)
            was_aborted = generation.finish == "abort"
            ended_by_chunk = generation.finish == "length" and limit < remaining_tokens
            was_cut = was_aborted or ended_by_chunk
            if not was_cut or len(generation.tokens) >= longest:
                return generation

    def leave(self, conversation: int) -> None:
        """Note that a conversation has ended."""
        self.going_on.discard(conversation)
        self.changed.set()

    async def in_step(self) -> None:
        """Make calls while conversations go on, each with all of them; none where they overlap anyway."""
        while self.going_on and not self.threads:
            await self.all_wait()
            await self.draw()

    async def as_they_come(self) -> None:
        """Make calls while conversations go on, each with those that wait by then; none where they overlap.

        A call begins once all wait, or after half of the time that the last one took: conversations that do
        something else for long hold up nobody, and those that are nearly ready share the call.
        """
        patience = PATIENCE
        while self.going_on and not self.threads:
            self.changed.clear()
            if not self._conversations_waiting():
                await self.changed.wait()
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self.all_wait(), patience)
            start = time.monotonic()
            await self.draw(in_thread=True)
            patience = max((time.monotonic() - start) / 2, PATIENCE)

    async def all_wait(self) -> None:
        """Return once all conversations that go on wait for the engine."""
        while len(self.waiting) < len(self.going_on) or self._conversations_waiting() != self.going_on:
            self.changed.clear()
            await self.changed.wait()

    async def draw(self, is_over: Callable[[], bool] | None = None, in_thread: bool = False) -> bool:
        """Make one call with what waits, for engines without overlap; return whether that was most of it.

        Where ``is_over`` may end it, it ends too once more wait than it has. There, and ``in_thread``, tools
        go on meanwhile. What is drawn by other settings waits for the next call.
        """

        def enough(ended: Sequence[int]) -> bool:
            assert is_over
            return is_over() or len(self.waiting) > len(waiting)

        self._conversations_waiting()
        waiting = sorted(self.waiting, key=lambda pending: pending.turn)
        if not waiting:
            return False
        sampling = waiting[0].sampling
        self.waiting = [pending for pending in waiting if pending.sampling != sampling]
        waiting = [pending for pending in waiting if pending.sampling == sampling]
        requests, places = merged([pending.request for pending in waiting])
        generate = partial(self.engine.generate, requests, sampling)
        try:
            if is_over is None and in_thread:
                generations = await asyncio.to_thread(generate)
            elif is_over is None:
                generations = generate()
            else:
                generations = await asyncio.to_thread(generate, enough, stays=True)
        except Exception as error:
            error.add_note(f"it was in a batch of {len(waiting)} turns")
            for pending in waiting:
                if not pending.answer.done():
                    pending.answer.set_exception(error)
            return True
        is_most = len(self.waiting) <= len(waiting)
        for pending, (request, seed) in zip(waiting, places, strict=True):
            if not pending.answer.done():  # it may have been cancelled meanwhile
                pending.answer.set_result(generations[request][seed])
        return is_most

    async def settle(self) -> None:
        """Leave the engine alone until the gate is opened; what is in flight comes back as far as it is."""
        self.gate.clear()
        calls = asyncio.gather(*map(asyncio.wrap_future, [*self.calls]), return_exceptions=True)
        has_grammar = bool(self.sampling.regex or self.sampling.json_schema)
        while not calls.done():
            # a response that follows a grammar can't be taken up again where it was cut
            if not (has_grammar and self.going_on):
                await asyncio.to_thread(self.engine.abort)
            await asyncio.wait([calls], timeout=SWEEP)

    def close(self) -> None:
        """Refuse requests from now on."""
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)

    async def _draw_once(self, turn: tuple[int, int], request: Request, sampling: Sampling) -> Generation:
        if self.threads:
            await self.gate.wait()
            call = self.threads.submit(self.engine.generate, [request], sampling)
            self.calls.add(call)
            call.add_done_callback(self.calls.discard)
            ((generation,),) = await asyncio.wrap_future(call)
            return generation
        waiting = PendingRequest(turn, request, sampling, asyncio.get_running_loop().create_future())
        self.waiting.append(waiting)
        self.changed.set()
        return await waiting.answer

    def _conversations_waiting(self) -> set[int]:
        """Return the conversations that wait; drop requests that were cancelled."""
        self.waiting = [pending for pending in self.waiting if not pending.answer.done()]
        return {pending.turn[0] for pending in self.waiting}


def merged(requests: Sequence[Request]) -> tuple[list[Request], list[tuple[int, int]]]:
    """Merge requests that differ in their seed alone into one; also return each answer's place.

    Example:
        >>> merged([Request((1, 2), [7]), Request((3,), [8]), Request((1, 2), [9])])[1]
        [(0, 0), (1, 0), (0, 1)]
    """
    index_of: dict[tuple[Any, ...], int] = {}
    shared: list[Request] = []
    places = []
    for request in requests:
        key = (tuple(request.prompt), request.max_new_tokens, request.drawn)
        index = index_of.setdefault(key, len(shared))
        if index == len(shared):
            shared.append(replace(request, seeds=[]))
        places.append((index, len(shared[index].seeds)))
        shared[index] = replace(shared[index], seeds=[*shared[index].seeds, *request.seeds])
    return shared, places
