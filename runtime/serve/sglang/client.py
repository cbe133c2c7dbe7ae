"""What is asked of an SGLang server over HTTP, beside generating."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlgraph.errors import RunError

PARTS = {"weights": ["weights"], "kv": ["kv_cache", "cuda_graph"]}  # ours -> SGLang's tags
FIRST = "default"  # what SGLang calls the weights that a server starts with
REPLY, GLANCE = 3600.0, 5.0  # seconds in which a call has to be answered, and a look at the server
LOST = (OSError, http.client.HTTPException)  # no connection, or one that ended amid an answer


class ServerLostError(RunError):
    """A server does not answer any more."""


class UnknownError(RunError):
    """A server's version does not know a call."""


@dataclass(frozen=True)
class Client:
    """A server: where it answers, and the API key that it asks for."""

    url: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What every call carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def post(self, call: str, body: dict[str, Any]) -> Any:
        """Make a call; its answer, as JSON where it is some.

        Raises:
            RunError: the server refused it.
            UnknownError: its version does not know it.
            ServerLostError: it did not answer.
        """
        headers = self.headers | {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{call}", json.dumps(body).encode(), headers)
        try:
            text = _text(request, REPLY)
        except urllib.error.HTTPError as error:
            law = f"the SGLang server at {self.url} refused {call}"
            kind = UnknownError if error.code == 404 else RunError
            raise kind(f"{law}: {error.code} {error.read().decode()[:500]}") from error
        except LOST as error:
            raise ServerLostError(
                f"the SGLang server at {self.url} did not answer {call}: {error}"
            ) from error
        answer = json.loads(text) if text.startswith(("{", "[")) else text
        if isinstance(answer, dict) and answer.get("success") is False:
            law = f"the SGLang server at {self.url} refused {call}"
            raise RunError(f"{law}: {answer.get('message', answer)}")
        return answer

    def look(self, call: str) -> Any:
        """What a server says of itself; None where it does not answer.

        Raises:
            RunError: it asks for another API key.
        """
        try:
            return json.loads(
                _text(urllib.request.Request(f"{self.url}/{call}", headers=self.headers), GLANCE)
            )
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                law = f"the SGLang server at {self.url} asks for another API key"
                raise RunError(f"{law}\n  set SGLANG_API_KEY where the workers start") from error
            return None
        except LOST:
            return None

    def is_healthy(self) -> bool:
        """Whether it generates a token; only of a server that is awake."""
        request = urllib.request.Request(f"{self.url}/health", headers=self.headers)
        try:
            _text(request, GLANCE)
        except LOST:
            return False
        return True

    def version(self) -> str | None:
        """Of its weights, as it was told with them; None where it does not answer."""
        info = self.look("model_info")
        return str(info["weight_version"]) if info else None

    def release(self, parts: Iterable[str]) -> None:
        """Release the memory of parts, the cache first; nothing may run."""
        for part in sorted(parts):
            self.flush()
            self.post("release_memory_occupation", {"tags": PARTS[part]})

    def retake(self, parts: Iterable[str]) -> None:
        """Take the memory of parts again, the weights first, so that they can be synced."""
        for part in sorted(parts, reverse=True):
            self.post("resume_memory_occupation", {"tags": PARTS[part]})

    def flush(self, paused: bool = False) -> None:
        """Forget cached keys and values; where it is not paused, once nothing runs.

        What has been answered is still in the scheduler for a moment, so it is waited for. What is paused
        stays there, and SGLang would wait for it too.
        """
        self.post("flush_cache" if paused else "flush_cache?timeout=60", {})

    def pause(self) -> None:
        """Stop generating; what runs gives up its keys and values, and waits."""
        self.post("pause_generation", {"mode": "retract"})

    def hold(self) -> None:
        """Stop generating; what runs comes back as far as it is, what comes waits."""
        self.post("pause_generation", {"mode": "abort"})

    def resume(self) -> None:
        """Generate again."""
        self.post("continue_generation", {})

    def begin_update(self) -> None:
        """Open a session of weight updates; one that another left open is closed first.

        A version of SGLang without sessions needs none.
        """
        try:
            self.post("begin_weight_update", {})
        except UnknownError:
            return
        except ServerLostError:
            raise
        except RunError:
            self.end_update()
            self.post("begin_weight_update", {})

    def end_update(self) -> None:
        """Close the session."""
        with suppress(UnknownError):
            self.post("end_weight_update", {})

    def local_address(self) -> str:
        """The address of this host on the way to the server."""
        parsed = urllib.parse.urlsplit(self.url)
        try:
            with socket.create_connection((parsed.hostname or "", parsed.port or 80), GLANCE) as way:
                return str(way.getsockname()[0])
        except OSError as error:
            raise ServerLostError(f"the SGLang server at {self.url} can't be reached: {error}") from error


def _text(request: urllib.request.Request, timeout: float) -> str:
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return str(reply.read().decode())
