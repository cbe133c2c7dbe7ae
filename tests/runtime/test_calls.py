"""Requests in flight, to servers whose answers are made up here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlgraph.runtime.engines.servers.calls import Calls
from rlgraph.runtime.engines.servers.sample_request import SampleRequest


def test_a_sample_that_is_given_up_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two samples one is enough, and the other takes too long just as it is ended."""
    server = SimpleNamespace(
        generates="generate",
        busy=(),
        title="server",
        url="http://here",
        request_body=lambda request, body: body,
        abortion=lambda request: ("abort", {}),
        own_weights=lambda answer: None,
        lacks_weights=lambda text: False,
        tokens=lambda chunk: [],
        is_left=lambda sample_request: False,
    )
    ended = asyncio.Event()

    async def answer(
        self: Calls, server: int, call: str, body: dict[str, Any], sample_request: Any = None
    ) -> tuple[int, str]:
        if call == "abort":
            ended.set()
        elif body["late"]:
            await ended.wait()
            raise TimeoutError
        return 200, '{"text": "done"}'

    monkeypatch.setattr(Calls, "_post", answer)
    calls = Calls([server], 2, 1.0, lambda: 0, None, request_retries=0)  # type: ignore[list-item]
    sample_requests = [SampleRequest({"late": late}, number) for number, late in enumerate((False, True))]
    assert calls.run(sample_requests, lambda ended: 0 in ended, [0, 1]) == [[{"text": "done"}], []]
    calls.close()
