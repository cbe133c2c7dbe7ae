"""A reward from a service that answers over HTTP.

POST {"samples": [{"question": ..., "response": ..., "answer": ...}, ...]}
  -> {"rewards": [number, ...]}                                              one per sample, in order
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

from rlgraph.errors import shortened
from rlgraph.nodes.reward.per_sample import Judged, OnError, RewardError, complain, is_reward, settled
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, op, samples, text

LONGEST = 2**24  # bytes of a reply
JudgedRow = dict[str, str]


class RemoteError(RewardError):
    """A service gave no rewards; the message says why."""


def service_url(url: str) -> str:
    """Return a URL as it is.

    Raises:
        ValueError: it is none of a service; the message does not repeat it.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        parts.hostname.encode("idna") if parts.hostname else None
    except ValueError:  # of the port, of brackets, of a name that no host can have
        fits = False
    if not (fits and url.isascii() and url.isprintable() and " " not in url):
        raise ValueError("no URL of a service; write for example http://judge:8000/score")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a user's name and password are not sent; leave them out of the URL")
    return url


@dataclass(frozen=True)
class Service:
    """The address of a reward service, with its time limit and retries."""

    url: str
    timeout: float  # seconds that a try may take
    retries: int  # tries after the first
    backoff: float  # seconds before the first retry; doubles with each

    def ask(self, batch: Sequence[JudgedRow]) -> list[float]:
        """Return a reward for each sample.

        Raises:
            RemoteError: the service refused, gave something else, or could not be reached in any try.
        """
        body = json.dumps({"samples": list(batch)}).encode()
        for tried in range(self.retries + 1):
            if tried:
                time.sleep(self.backoff * 2 ** (tried - 1))
            try:
                return _rewards(self._post(body), len(batch))
            except urllib.error.HTTPError as error:
                with error:  # closes the connection
                    reason = f"HTTP {error.code} {error.reason}"
                if error.code in range(300, 400):
                    reason += ", a redirect, which is not followed; give the URL that it leads to"
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
        raise RemoteError(f"{self}: {reason}, in {tried + 1} of {self.retries + 1} tries")

    def __str__(self) -> str:
        """Return the URL without its query, which may hold a key."""
        return self.url.partition("?")[0].partition("#")[0]

    def _post(self, body: bytes) -> bytes:
        """Return the reply; raise a ``TimeoutError`` where all of it together takes too long."""
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        handler = OneReply(self.timeout)
        try:
            with urllib.request.build_opener(handler).open(request, timeout=self.timeout) as reply:
                read = bytes(reply.read(LONGEST + 1))
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException, ValueError):
            handler.check()
            raise
        finally:
            handler.timer.cancel()
        handler.check()  # a reply without a length ends where its connection does
        if len(read) > LONGEST:
            raise RemoteError(f"{self}: the reply has over {LONGEST // 2**20} MiB")
        return read


class OneReply(HTTPSHandler, HTTPHandler, HTTPRedirectHandler):
    """Opens connections that end when their time is up, and follows no redirect.

    urllib's own time limit is for each read, and one byte begins it anew.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.timeout, self.end = timeout, time.monotonic() + timeout
        self.sockets: list[socket.socket] = []
        self.timer = threading.Timer(timeout, self._disconnect)
        self.timer.daemon = True
        self.timer.start()

    def http_open(self, request: Any) -> Any:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: Any) -> Any:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection), request)

    def redirect_request(self, *args: Any) -> None:
        """Follow none: a reply of 3xx is an error then."""

    def check(self) -> None:
        """Raise a ``TimeoutError`` where the time is up."""
        if time.monotonic() > self.end:
            raise TimeoutError(f"it took over {self.timeout:g} s")

    def _connection(self, kind: Any, *args: Any, **options: Any) -> Any:
        connection = kind(*args, **options)
        connect = connection.connect

        def watched() -> None:
            connect()
            self.sockets.append(connection.sock)
            self.check()

        connection.connect = watched
        return connection

    def _disconnect(self) -> None:
        for one in self.sockets:
            with suppress(OSError):
                socket.socket.shutdown(one, socket.SHUT_RDWR)  # TLS too, without its farewell


@op(assumes=("dropped",), beside=True)
def remote(
    ctx: Context,
    question: text[samples],
    responses: text[samples],
    answer: text[samples],
    *,
    url: Annotated[str, Field(pattern=r"^https?://"), AfterValidator(service_url)],
    batch: Annotated[int, Field(ge=1)] = 32,
    parallel: Annotated[int, Field(ge=1)] = 8,
    timeout: PositiveFloat = 60.0,
    retries: Annotated[int, Field(ge=0)] = 3,
    backoff: NonNegativeFloat = 1.0,
    on_error: OnError = "fail",
) -> Judged:
    r"""Rewards that a service gives: a judge, or a reward model served elsewhere (RFC 9110).

    POSTs ``{"samples": [{"question", "response", "answer"}, ...]}``, expects ``{"rewards": [number, ...]}``,
    one per sample in order, finite in float32, 16 MiB at most. Tries again when the service can't be reached,
    is late, or says 429 or 5xx, after ``backoff``, then twice that, and so on; not when it says anything
    else, a redirect among it, which is not followed. A batch that fails has reward 0 and ``failed`` true
    unless ``on_error`` is ``fail``, and the first of them is logged with a sample. Errors show the URL
    without its query.
    Records ``reward/mean`` (of what did not fail) and ``reward/failed``, the fraction that did.

    Attributes:
        url: where to POST, http or https, without a user's name and password.
        batch: samples of one request, at least 1.
        parallel: requests at a time, at least 1.
        timeout: seconds that a try may take, its whole reply included, above 0.
        retries: tries after the first, at least 0.
        backoff: seconds before the first retry, at least 0; each later one waits twice as long.
        on_error: fail ends the run, saying why; zero goes on with reward 0; drop as well, where other nodes
            read the rows of a filter.judged alone.

    Example:
        rewards: {op: reward.remote, url: "http://judge:8000/score", on_error: zero}
    """
    names = ("question", "response", "answer")
    rows = [dict(zip(names, row, strict=True)) for row in zip(question, responses, answer, strict=True)]
    batches = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    service = Service(url, timeout, retries, backoff)
    with ThreadPoolExecutor(parallel) as pool:
        outcomes = list(pool.map(lambda asked: _outcome(service, asked), batches))
    answers = list(zip(outcomes, batches, strict=True))
    complain([(error, batch[0]) for error, batch in answers if isinstance(error, RemoteError)], on_error)
    filled = [[math.nan] * len(batch) if isinstance(o, RemoteError) else o for o, batch in answers]
    rewards = torch.tensor([reward for batch in filled for reward in batch], dtype=torch.float32)
    return settled(ctx, rewards, rewards.isnan())


def _outcome(service: Service, batch: Sequence[JudgedRow]) -> list[float] | RemoteError:
    try:
        return service.ask(batch)
    except RemoteError as error:
        return error


def _rewards(reply: bytes, count: int) -> list[float]:
    """Return the numbers of a reply.

    Raises:
        RemoteError: it is something else.
    """
    try:
        rewards = json.loads(reply)["rewards"]
    except (ValueError, KeyError, TypeError, RecursionError):
        rewards = None
    if isinstance(rewards, list) and len(rewards) == count and all(map(_is_number, rewards)):
        return [float(reward) for reward in rewards]
    got = shortened(repr(reply.decode("utf-8", "backslashreplace")), 200)
    raise RemoteError(f'wanted {{"rewards": [{count} finite numbers]}}, got {got}')


def _is_number(value: object) -> bool:
    return is_reward(value) and not isinstance(value, bool)
