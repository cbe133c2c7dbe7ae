"""Requests to servers, each for one sample, and what is known of their replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(eq=False)
class SampleRequest:
    """A request for one sample.

    It goes to the server of its ``conversation`` where that is not full: a key of turns, or in a tuple one of
    the samples of one prompt, which is forgotten with the call.
    """

    body: dict[str, Any]
    conversation: Hashable
    versions: set[int] = field(default_factory=set)  # its tokens may be of these weights
    aborted: bool = False  # what there is of it is wanted back
    is_paused: bool = False  # its server is to get new weights: what comes back of it goes on behind them
    slow_server: int | None = None  # the server that has not answered in time
    outlives_call: bool = False  # it goes on between calls
    # its reply; before that what servers streamed that were lost, and what is streamed now, which is replaced
    chunks: list[dict[str, Any]] = field(default_factory=list)
    continued_body: Callable[[Sequence[int]], dict[str, Any]] | None = (
        None  # its body once it has these tokens
    )
    is_cut: bool = True  # whether it can go on behind tokens: not, where a grammar would begin anew


class InFlight(NamedTuple):
    """A sample that was sent: the number of its server, and the future of its answer."""

    sample_request: SampleRequest
    server: int
    reply: asyncio.Future[tuple[int, str]]


async def events(content: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield server-sent events of JSON, as they come, up to ``[DONE]``.

    Raises:
        ConnectionError: they end before it.
    """
    unread = b""
    async for received in content.iter_any():
        *complete, unread = (unread + received).split(b"\n\n")
        for event in complete:
            if (data := event.removeprefix(b"data:").strip()) == b"[DONE]":
                return
            yield json.loads(data)
    raise ConnectionError("a reply ended before it was whole")
