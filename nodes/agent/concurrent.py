"""Many coroutines, one engine: ``await engine.generate(...)``.

An engine whose calls overlap gets each request as it comes. Any other one gets them in rounds: one call of
all requests, when every conversation that goes on waits for it.

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

from rlgraph.engines import Generation, Request, Sampling, ServeEngine


@dataclass(frozen=True)
class Waiting:
    """A request, and who asked: conversation and call, by which a round is in order."""

    asked: tuple[int, int]
    request: Request
    answer: asyncio.Future[Generation]


class Rounds:
    """Requests of one seed each, for ``conversations`` that start now."""

    def __init__(self, engine: ServeEngine, sampling: Sampling, conversations: int) -> None:
        self.engine, self.sampling, self.going_on = engine, sampling, conversations
        self.waiting: list[Waiting] = []
        self.threads = ThreadPoolExecutor(conversations or 1) if engine.overlaps else None

    async def generate(self, asked: tuple[int, int], request: Request) -> Generation:
        """A request's answer; ``asked`` are the numbers of its conversation and of the call in that."""
        loop = asyncio.get_running_loop()
        if self.threads:
            call = loop.run_in_executor(self.threads, self.engine.generate, [request], self.sampling)
            ((made,),) = await call
            return made
        waiting = Waiting(asked, request, loop.create_future())
        self.waiting.append(waiting)
        self._look()
        return await waiting.answer

    def leave(self) -> None:
        """A conversation has ended."""
        self.going_on -= 1
        self._look()

    def close(self) -> None:
        """Nobody asks any more."""
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        """Whether all wait. Those who are about to ask in this turn of the event loop still can."""
        if len(self.waiting) < max(self.going_on, 1):
            return
        self.waiting = [each for each in self.waiting if not each.answer.done()]  # without the cancelled
        if self.waiting and len({each.asked[0] for each in self.waiting}) == self.going_on:
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        waiting = sorted((w for w in self.waiting if not w.answer.done()), key=lambda each: each.asked)
        self.waiting = []
        if not waiting:
            return  # two looked, and one round has served both; or those who waited were cancelled
        requests, places = merged([each.request for each in waiting])
        try:
            made = self.engine.generate(requests, self.sampling)
        except Exception as error:
            for each in waiting:
                each.answer.set_exception(error)
            return
        for each, (request, seed) in zip(waiting, places, strict=True):
            each.answer.set_result(made[request][seed])


def merged(requests: Sequence[Request]) -> tuple[list[Request], list[tuple[int, int]]]:
    """Requests of one prompt and limit as one with several seeds, and where each one's answer will be.

    Example:
        >>> merged([Request((1, 2), [7]), Request((3,), [8]), Request((1, 2), [9])])[1]
        [(0, 0), (1, 0), (0, 1)]
    """
    found: dict[tuple[Any, ...], int] = {}
    whole: list[Request] = []
    places = []
    for request in requests:
        at = found.setdefault((tuple(request.prompt), request.max_new_tokens), len(whole))
        if at == len(whole):
            whole.append(replace(request, seeds=[]))
        places.append((at, len(whole[at].seeds)))
        whole[at] = replace(whole[at], seeds=[*whole[at].seeds, *request.seeds])
    return whole, places
