"""Conversations that outlive a call of their op, on the worker that began them.

    round      1                    2            3            a call of the op
    sample 0   turn, tool, turn ──> turn ─ end
    sample 1   turn ─ end                                     waits for its group
    sample 2                        turn, tool ─> tool, turn ...

They run on an event loop of a thread of their own, so that tools go on between rounds, and turns too where
an engine's calls overlap: there a round ends with the first group all of whose conversations have ended, or
after a moment. On any other engine it is one call, for those that wait for it. Those that wait for tools stay
for a later one; where there are no others, the first that is answered begins the call. Either ends before its
time where it is due.

Where nothing may depend on time, all wait for each other: a round of such an engine is one call for all, and
what tools answer to that.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from secrets import randbits
from typing import Any, TypeVar

from rlgraph.nodes.agent.chat import Chat, LimitReached, tool_loop
from rlgraph.nodes.agent.request_batching import RequestBatcher
from rlgraph.nodes.agent.toolbox import row_of
from rlgraph.nodes.support.user_call import DaemonThreads
from rlgraph.ops import Loop

Finished = TypeVar("Finished")
MOMENT = 1.0  # seconds after which a round ends although no group has
LOOK = 0.02  # seconds between two looks at whether a round is due to end, while nothing else happens


@dataclass(eq=False)
class LiveChat:
    """A conversation that was begun, and the task that returns the reward which its tools give it."""

    chat: Chat
    reward: asyncio.Task[float]
    key: int = field(default_factory=lambda: randbits(63))  # by which later rounds ask for it


class LiveChats:
    """The conversations of one node on its worker, which go on with its next call.

    Invariants:
        - Conversations, tools and batching run on ``loop`` alone; the worker's own thread waits for it.
        - ``live`` has the conversations that the last round asked for; all others were cancelled.
        - Between ``settle`` and the next round nothing calls the engine.
    """

    def __init__(self, engine: RequestBatcher, parallel: int) -> None:
        """Start with none. So many calls of tools that are not async run at a time."""
        self.engine, self.threads = engine, DaemonThreads(parallel)
        self.live: dict[int, LiveChat] = {}  # by their keys
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def round(
        self,
        keys: Sequence[int],
        samples: int,
        n: int,
        begin: Callable[[int], Chat],
        loop: Loop | None,
        is_due: Callable[[], bool] | None = None,
    ) -> list[LiveChat]:
        """Drive conversations until the round ends; return them in order.

        Those that were begun before and are not asked for any more are cancelled.

        Args:
            keys: those of the first, which an earlier round has begun. One that is not known here, as its
                worker is lost, begins anew.
            samples: how many there are, ``n`` to a group.
            begin: makes one, by its place.
            loop: leads it.
            is_due: says whether the round is to end before its time; None: it may not depend on time.
        """

        async def driven() -> list[LiveChat]:
            requested = [self.live.get(key) for key in keys] + [None] * (samples - len(keys))
            await self._give_up([*{*self.live.values()}.difference(requested)])
            chats = []
            for place, live_chat in enumerate(requested):
                chats.append(live_chat or self._start(begin(place), n, loop))
            self.live = {live_chat.key: live_chat for live_chat in chats}
            groups = [chats[start : start + n] for start in range(0, samples, n)]
            await self._drive(groups, is_due)
            for live_chat in chats:
                if live_chat.reward.done() and live_chat.reward.exception():
                    await self._give_up(chats)
                    live_chat.reward.result()  # raises what the conversation raised
            return chats

        return self._wait(driven())

    def settle(self) -> None:
        """Leave the engine alone until the next round."""
        self._wait(self.engine.settle())

    def close(self) -> None:
        """Cancel what goes on, and free what its tools hold."""
        self._wait(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.engine.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _wait(self, work: Coroutine[Any, Any, Finished]) -> Finished:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _start(self, chat: Chat, n: int, loop: Loop | None) -> LiveChat:
        self.engine.going_on.add(chat.number)
        reward = asyncio.ensure_future(conversation(chat, n, loop))
        reward.add_done_callback(lambda _: self.engine.changed.set())
        return LiveChat(chat, reward)

    async def _drive(self, groups: Sequence[Sequence[LiveChat]], is_due: Callable[[], bool] | None) -> None:
        engine = self.engine
        if engine.threads is None and is_due is None:
            await engine.all_wait()
            await engine.draw()
            await engine.all_wait()
            ended = []
            for group in groups:
                for live_chat in group:
                    if live_chat.chat.number not in engine.going_on:
                        ended.append(live_chat.reward)
            await asyncio.gather(*ended, return_exceptions=True)  # tools give rewards, and are released
            return

        def is_over() -> bool:
            for group in groups:
                if all(live_chat.reward.done() for live_chat in group):
                    return True
            return is_due is not None and is_due()

        engine.gate.set()
        await asyncio.sleep(0)  # those that were begun ask
        end = time.monotonic() + MOMENT
        while groups:
            was_most = await engine.draw(is_over)
            if was_most or is_over() or time.monotonic() > end:
                return
            engine.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.changed.wait(), LOOK if is_due else MOMENT)

    async def _give_up(self, chats: Sequence[LiveChat]) -> None:
        for live_chat in chats:
            live_chat.reward.cancel()
        await asyncio.gather(*(live_chat.reward for live_chat in chats), return_exceptions=True)
        for live_chat in chats:
            self.engine.leave(live_chat.chat.number)

    async def _close(self) -> None:
        await self._give_up([*self.live.values()])
        await self.engine.settle()


async def conversation(chat: Chat, n: int, loop: Loop | None) -> float:
    """Hold one of ``n`` conversations of a prompt; return the reward that its tools give it.

    What it raises says which it was.
    """
    try:
        return await _lead(chat, loop)
    except Exception as error:
        if not any(note.startswith("it was in ") for note in getattr(error, "__notes__", ())):
            description = f"sample {chat.number}, which is of prompt {chat.number // n}, in turn {chat.turns}"
            error.add_note(f"it was in {description}")
        raise


async def _lead(chat: Chat, loop: Loop | None) -> float:
    lead = tool_loop
    if loop:
        lead = partial(loop.body, **row_of(loop, chat.tools.row, ("chat",)))
    try:
        try:
            await lead(chat)
        except LimitReached:
            chat.truncated = True
        finally:
            chat.engine.leave(chat.number)
        return await chat.tools.reward()
    finally:
        await chat.tools.release()
