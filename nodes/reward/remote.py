"""A reward from a service that answers over HTTP.

POST {"samples": [{"question": ..., "response": ..., "answer": ...}, ...]}
  -> {"rewards": [number, ...]}                                              one per sample, in order
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlgraph.nodes.reward.per_sample import Judged, OnError, RewardError, complain, settled
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, op, samples, text

JudgedRow = dict[str, str]


class RemoteError(RewardError):
    """A service gave no rewards; the message says why."""


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
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
        raise RemoteError(f"{self.url}: {reason}, in {tried + 1} of {self.retries + 1} tries")

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.timeout) as reply:
            return bytes(reply.read())


@op(assumes=("dropped",), beside=True)
def remote(
    ctx: Context,
    question: text[samples],
    responses: text[samples],
    answer: text[samples],
    *,
    url: Annotated[str, Field(pattern=r"^https?://")],
    batch: Annotated[int, Field(ge=1)] = 32,
    parallel: Annotated[int, Field(ge=1)] = 8,
    timeout: PositiveFloat = 60.0,
    retries: Annotated[int, Field(ge=0)] = 3,
    backoff: NonNegativeFloat = 1.0,
    on_error: OnError = "fail",
) -> Judged:
    r"""Rewards that a service gives: a judge, or a reward model served elsewhere (RFC 9110).

    POSTs ``{"samples": [{"question", "response", "answer"}, ...]}``, expects ``{"rewards": [number, ...]}``,
    one per sample in order. Tries again when the service can't be reached, is late, or says 429 or 5xx, after
    ``backoff``, then twice that, and so on; not when it says anything else. A batch that fails has reward 0
    and ``failed`` true unless ``on_error`` is ``fail``, and the first of them is logged with a sample.
    Records ``reward/mean`` (of what did not fail) and ``reward/failed``, the fraction that did.

    Attributes:
        url: where to POST, http or https.
        batch: samples of one request, at least 1.
        parallel: requests at a time, at least 1.
        timeout: seconds of silence after which a try is given up, above 0.
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
    except (ValueError, KeyError, TypeError):
        rewards = None
    if isinstance(rewards, list) and len(rewards) == count and all(map(_is_number, rewards)):
        return [float(reward) for reward in rewards]
    raise RemoteError(f'wanted {{"rewards": [{count} finite numbers]}}, got {reply[:200]!r}')


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
