"""A server that answers over HTTP: its address, its API key, and calls that any of them takes."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar, Self

from rlgraph.errors import RunError
from rlgraph.nodes.support.user_call import DaemonThreads
from rlgraph.runtime.engines.servers.sample_request import SampleRequest
from rlgraph.runtime.messages.errors import ServerLostError

REPLY, GLANCE = 3600.0, 5.0  # seconds in which a call has to be answered, and a look at the server
LOST = (OSError, http.client.HTTPException)  # no connection, or one that ended amid an answer


class UnknownError(RunError):
    """A server's version does not know a call."""


@dataclass(frozen=True)
class Endpoint(ABC):
    """A server: its address, and the API key that it asks for."""

    url: str
    key: str = ""

    title: ClassVar[str] = "server"  # errors call it this
    variable: ClassVar[str] = ""  # the environment variable that holds the key
    generates: ClassVar[str] = ""  # the call that makes a sample
    busy: ClassVar[Collection[int]] = ()  # statuses after which a sample is asked for again

    @classmethod
    def of_addresses(cls, addresses: Sequence[str]) -> list[Self]:
        """Return servers that run already, with the key that the environment holds."""
        key = os.environ.get(cls.variable, "")
        return [cls(address.rstrip("/"), key) for address in addresses]

    @abstractmethod
    def version(self) -> str | None:
        """Return the version of its weights, as it was told with them; None where it does not answer."""

    def own_weights(self, answer: dict[str, Any]) -> str | None:
        """Return the weights that a sample is of, where the server started with these; else None.

        The answer may be a refusal by ``lacks_weights``.
        """
        return None

    def lacks_weights(self, text: str) -> bool:
        """Return whether it refused a sample since it has yet to be brought the weights asked for."""
        return False

    def request_body(self, request: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a sample's call, which ``abortion`` can name by ``request``."""
        return body

    def tokens(self, chunk: dict[str, Any]) -> Sequence[int]:
        """Return the tokens of what was streamed of a sample; of a server that does not stream none."""
        return ()

    def joined(self, earlier: Sequence[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any]:
        """Return what is known of a sample after an event of its stream, after one chunk or none."""
        return event

    async def receive(
        self, sample_request: SampleRequest, streamed: AsyncIterator[dict[str, Any]]
    ) -> tuple[int, str]:
        """Take what is streamed into a chunk; return its status, and a text where it is no sample."""
        known_chunks = len(sample_request.chunks)
        async for event in streamed:
            if "error" in event:
                return int(event["error"].get("code") or 500), json.dumps(event)
            if self.own_weights(event) is not None:
                return 200, json.dumps(event)
            sample_request.chunks[known_chunks:] = [self.joined(sample_request.chunks[known_chunks:], event)]
        return 200, ""

    def is_left(self, sample_request: SampleRequest) -> bool:
        """Return whether a sample whose reply was ended from outside has more to come."""
        return False

    def abortion(self, request: str) -> tuple[str, dict[str, Any]] | None:
        """Return the call that ends a request; None where it ends with its connection."""
        return None

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every call."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def post(self, call: str, body: dict[str, Any], timeout: float = REPLY) -> Any:
        """Make a call; return its answer, as JSON where it is some.

        Raises:
            RunError: the server refused it.
            UnknownError: its version does not know it.
            ServerLostError: it did not answer.
        """
        try:
            text = self._text(call, timeout, body)
        except urllib.error.HTTPError as error:
            law = f"the {self.title} at {self.url} refused {call}"
            kind = UnknownError if error.code == 404 else RunError
            raise kind(f"{law}: {error.code} {error.read().decode()[:500]}") from error
        except LOST as error:
            raise ServerLostError(f"the {self.title} at {self.url} did not answer {call}: {error}") from error
        return json.loads(text) if text.startswith(("{", "[")) else text

    def look(self, call: str) -> Any:
        """Return a server's own report; None where it does not answer.

        Raises:
            RunError: it asks for another API key.
        """
        try:
            return json.loads(self._text(call, GLANCE))
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                law = f"the {self.title} at {self.url} asks for another API key"
                raise RunError(f"{law}\n  set {self.variable} where the workers start") from error
            return None
        except LOST:
            return None

    def is_healthy(self) -> bool:
        """Return whether it generates a token; only of a server that is awake."""
        try:
            self._text("health", GLANCE)
        except LOST:
            return False
        return True

    def _text(self, call: str, timeout: float, body: dict[str, Any] | None = None) -> str:
        """Return the text of an answer, all of which has to come in time.

        The limit of ``urlopen`` is one per read: an answer whose bytes drip would be waited for without end.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = self.headers if data is None else self.headers | {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{call}", data, headers)
        threads = DaemonThreads(1)
        answer = threads.submit(_exchanged, request, timeout)
        threads.shutdown()  # once the answer is here
        try:
            text: str = answer.result(timeout)
        except TimeoutError:  # its own, too
            raise TimeoutError(f"no whole answer in {timeout:g} s") from None
        return text


def _exchanged(request: urllib.request.Request, timeout: float) -> str:
    """Return the text of an answer; that of a refusal is read with it."""
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
        raise urllib.error.HTTPError(error.url, error.code, error.msg, error.hdrs, BytesIO(text)) from None
