"""A reward from a service that answers over HTTP.

POST {"samples": [{"question": ..., "response": ..., "answer": ...}, ...]}
  -> {"rewards": [number, ...]}                                              one per sample, in order
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

from rlgraph.errors import shortened
from rlgraph.nodes.reward.per_sample import (
    Judged,
    OnError,
    RewardError,
    as_json,
    complain,
    is_reward,
    settled,
)
from rlgraph.nodes.support.lazy import asyncio, torch
from rlgraph.ops import Context, anything, op, samples, text

if TYPE_CHECKING:
    from aiohttp import ClientSession, StreamReader

LONGEST = 2**24  # bytes of a reply
JudgedRow = dict[str, Any]


class RemoteError(RewardError):
    """A service gave no rewards; the message says why."""


def service_url(url: str) -> str:
    """Return a URL as it is.

    Raises:
        ValueError: it is not that of a service; the message does not repeat it.
    """
    try:
        url_parts = urlsplit(url)
        is_http = url_parts.scheme in ("http", "https")
        is_address = bool(url_parts.hostname) and url_parts.port != 0
        if url_parts.hostname:
            url_parts.hostname.encode("idna")
    except ValueError:  # of the port, of brackets, of a name that no host can have
        is_http = is_address = False
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if not (is_http and is_address and is_plain):
        raise ValueError("no URL of a service; write for example http://judge:8000/score")
    if url_parts.username is not None or url_parts.password is not None:
        raise ValueError("a user's name and password are not sent; leave them out of the URL")
    return url


@dataclass(frozen=True)
class Service:
    """The address of a reward service, with its time limit and retries."""

    url: str
    timeout: float  # seconds that a try may take
    retries: int  # tries after the first
    backoff: float  # seconds before the first retry; doubles with each

    async def ask(self, session: ClientSession, batch: Sequence[JudgedRow]) -> list[float]:
        """Return a reward for each sample.

        Raises:
            RemoteError: the service refused, gave something else, or could not be reached in any try.
        """
        from aiohttp import ClientError

        for tried in range(self.retries + 1):
            if tried:
                await asyncio.sleep(self.backoff * 2 ** (tried - 1))
            body = {"samples": list(batch)}
            try:
                async with session.post(
                    self.url, proxy=self._proxy(), json=body, allow_redirects=False
                ) as reply:
                    if 200 <= reply.status < 300:
                        return _rewards(await self._read_reply(reply.content), len(batch))
                    reason = f"HTTP {reply.status} {reply.reason}"
                    if reply.status in range(300, 400):
                        reason += ", a redirect, which is not followed; give the URL that it leads to"
                    if reply.status != 429 and reply.status < 500:
                        break
            except TimeoutError:
                reason = f"TimeoutError: it took over {self.timeout:g} s"
            except (ClientError, OSError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
        raise RemoteError(f"{self}: {reason}, in {tried + 1} of {self.retries + 1} tries")

    def __str__(self) -> str:
        """Return the URL without its query, which may hold a key."""
        return self.url.partition("?")[0].partition("#")[0]

    def _proxy(self) -> str | None:
        """Return the proxy that the environment names for the service, if any."""
        url_parts = urlsplit(self.url)
        if proxy_bypass(url_parts.netloc):
            return None
        proxy = getproxies().get(url_parts.scheme)
        if proxy and "://" not in proxy:
            return f"http://{proxy}"
        return proxy

    async def _read_reply(self, content: StreamReader) -> bytes:
        try:
            await content.readexactly(LONGEST + 1)
        except asyncio.IncompleteReadError as whole:
            return whole.partial
        raise RemoteError(f"{self}: the reply has over {LONGEST // 2**20} MiB")


@op(assumes=("dropped",), beside=True, reads=("columns",))
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
    columns: list[str] = [],  # noqa: B006 - never changed
    on_error: OnError = "fail",
    **more: anything[samples],
) -> Judged:
    r"""Rewards from a service: a judge, or a reward model served elsewhere (RFC 9110).

    POSTs ``{"samples": [{"question", "response", "answer"}, ...]}``, with the fields of ``columns`` added,
    and expects ``{"rewards": [number, ...]}``, one per sample in order, finite in float32, 16 MiB at most.
    Retries if the service can't be reached, is late, or answers 429 or 5xx, after ``backoff``, then twice
    that, and so on. It does not retry after any other answer; redirects are not followed. A batch that fails
    has reward 0 and ``failed`` true, unless ``on_error`` is ``fail``; the first such batch is logged with a
    sample. Errors show the URL without its query. Records ``reward/mean`` (of samples that did not fail) and
    ``reward/failed``, the fraction that failed.

    Attributes:
        url: where to POST, http or https, without user name and password.
        batch: samples per request, at least 1.
        parallel: concurrent requests, at least 1.
        timeout: seconds that a try may take, including its whole reply, above 0.
        retries: retries after the first try, at least 0.
        backoff: seconds before the first retry, at least 0; each later one waits twice as long.
        columns: more columns to send with each sample, as JSON values, as in [rubric, tests].
        on_error: fail: the run ends and says why; zero: it goes on with reward 0; drop: the same, and a
            filter.judged drops these samples for other nodes.

    Example:
        rewards: {op: reward.remote, url: "http://judge:8000/score", on_error: zero}
    """
    fields = {"question": question, "response": responses, "answer": answer}
    fields |= {name: as_json(values) for name, values in more.items()}
    rows = [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
    batches = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    service = Service(url, timeout, retries, backoff)
    outcomes = asyncio.run(_all(service, batches, parallel))
    numbers: list[float] = []
    failures = []
    for samples_of_batch, outcome in zip(batches, outcomes, strict=True):
        if isinstance(outcome, RemoteError):
            failures.append((len(numbers), outcome, samples_of_batch[0]))
            numbers += [math.nan] * len(samples_of_batch)
        else:
            numbers += outcome
    complain(ctx, failures, on_error)
    rewards = torch.tensor(numbers, dtype=torch.float32)
    return settled(ctx, rewards, rewards.isnan())


async def _all(
    service: Service, batches: Sequence[Sequence[JudgedRow]], parallel: int
) -> list[list[float] | RemoteError]:
    """Return the rewards of each batch, or why it has none."""
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    room = asyncio.Semaphore(parallel)
    connector = TCPConnector(limit=0, force_close=True)
    timeout = ClientTimeout(total=service.timeout)
    async with ClientSession(connector=connector, timeout=timeout) as session:

        async def outcome_of(batch: Sequence[JudgedRow]) -> list[float] | RemoteError:
            async with room:
                try:
                    return await service.ask(session, batch)
                except RemoteError as error:
                    return error

        return list(await asyncio.gather(*map(outcome_of, batches)))


def _rewards(reply: bytes, count: int) -> list[float]:
    """Return the numbers of a reply.

    Raises:
        RemoteError: it is something else.
    """
    try:
        rewards = json.loads(reply)["rewards"]
    except (ValueError, KeyError, TypeError, RecursionError):
        rewards = None
    if isinstance(rewards, list) and len(rewards) == count:
        truth_values = any(isinstance(reward, bool) for reward in rewards)
        if not truth_values and all(map(is_reward, rewards)):
            return [float(reward) for reward in rewards]
    got = shortened(repr(reply.decode("utf-8", "backslashreplace")), 200)
    raise RemoteError(f'wanted {{"rewards": [{count} finite numbers]}}, got {got}')
