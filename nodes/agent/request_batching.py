"""Request batching: many coroutines share one engine by ``await engine.generate(...)``.

An engine whose calls overlap gets each request as it comes. Any other engine gets them in rounds: one call
with all requests, when every conversation that goes on waits for it.

    tools     ──a── ──b────────         ──a──
    engine    ┌ a b c ┐        ┌ a b ┐        ┌ a ┐

So which requests share a call does not depend on how long a tool took, and a run can be had again bit for
bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from rlgraph.ops import Generation, Request, Sampling, ServeEngine


@dataclass(frozen=True)
class PendingRequest:
    """A request that waits, with its conversation and call, by which a round is sorted."""

    asked: tuple[int, int]
    request: Request
    answer: asyncio.Future[Generation]


class RequestBatcher:
    """Batches requests of one seed each, for ``conversations`` that start now."""

    def __init__(self, engine: ServeEngine, sampling: Sampling, conversations: int) -> None:
        self.engine, self.sampling, self.going_on = engine, sampling, conversations
        self.waiting: list[PendingRequest] = []
        self.threads = ThreadPoolExecutor(conversations or 1) if engine.overlaps else None

    async def generate(self, asked: tuple[int, int], request: Request) -> Generation:
        """Return a request's answer; ``asked`` numbers its conversation and the call within that."""
        loop = asyncio.get_running_loop()
        if self.threads:
            call = loop.run_in_executor(self.threads, self.engine.generate, [request], self.sampling)
            ((generation,),) = await call
            return generation
        waiting = PendingRequest(asked, request, loop.create_future())
        self.waiting.append(waiting)
        self._look()
        return await waiting.answer

    def leave(self) -> None:
        """Note that a conversation has ended."""
        self.going_on -= 1
        self._look()

    def close(self) -> None:
        """Refuse requests from now on."""
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        """Start a round once all conversations wait; others may still ask in this turn of the event loop."""
        if len(self.waiting) < max(self.going_on, 1):
            return
        self.waiting = [each for each in self.waiting if not each.answer.done()]  # drops the cancelled
        if self.waiting and len({each.asked[0] for each in self.waiting}) == self.going_on:
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        waiting = sorted((w for w in self.waiting if not w.answer.done()), key=lambda each: each.asked)
        self.waiting = []
        if not waiting:
            return  # an earlier look served this round, or those who waited were cancelled
        requests, places = merged([each.request for each in waiting])
        try:
            generations = self.engine.generate(requests, self.sampling)
        except Exception as error:
            error.add_note(f"it was in a batch of {len(waiting)} turns")
            for each in waiting:
                each.answer.set_exception(error)
            return
        for each, (request, seed) in zip(waiting, places, strict=True):
            each.answer.set_result(generations[request][seed])


def merged(requests: Sequence[Request]) -> tuple[list[Request], list[tuple[int, int]]]:
    """Merge requests of one prompt and limit into one with several seeds; also return each answer's place.

    Example:
        >>> merged([Request((1, 2), [7]), Request((3,), [8]), Request((1, 2), [9])])[1]
        [(0, 0), (1, 0), (0, 1)]
    """
    index_of: dict[tuple[Any, ...], int] = {}
    whole: list[Request] = []
    places = []
    for request in requests:
        index = index_of.setdefault((tuple(request.prompt), request.max_new_tokens), len(whole))
        if index == len(whole):
            whole.append(replace(request, seeds=[]))
        places.append((index, len(whole[index].seeds)))
        whole[index] = replace(whole[index], seeds=[*whole[index].seeds, *request.seeds])
    return whole, places
