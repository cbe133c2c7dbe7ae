"""The HTTP server of episodes: OpenAI's and Anthropic's protocols on loopback, a secret key per episode.

    POST /v1/chat/completions      OpenAI's chat completions
    POST /v1/responses             OpenAI's responses
    POST /v1/messages              Anthropic's messages
    POST /v1/messages/count_tokens
    GET  /v1/models

Anthropic's clients add ``/v1`` to the address that they are given, OpenAI's do not: ``/v1/v1/...`` is the
same. The key stands behind ``Authorization: Bearer`` or in ``x-api-key``; it names the episode, and is worth
nothing once the episode is over.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlgraph.errors import RunError
from rlgraph.nodes.endpoint import chat_completions, messages, responses
from rlgraph.nodes.endpoint.episode import Episode
from rlgraph.nodes.endpoint.request import AgentRequest, RequestError, SentAnswer
from rlgraph.ops import Sampling
from rlgraph.ops.registry import absent_module

LOOPBACK = "127.0.0.1"
MOST_BYTES = 32 * 2**20  # of a request: the longest contexts have some 4 MB of text
RETRY_HEADER = "x-stainless-retry-count"  # of the SDKs of OpenAI and Anthropic, 0 at first
CLOSING = 5.0  # seconds for connections to end


@dataclass(frozen=True)
class ClientProtocol:
    """A protocol that clients speak.

    Attributes:
        asked: reads a request, behind the one that it goes on with.
        previous: returns the id of the response that it goes on with; None: it repeats what came before.
        reply: makes the response.
        events: makes the response as server-sent events.
        error: makes the response that tells a problem.
    """

    asked: Callable[[Mapping[str, Any], Mapping[str, Any], AgentRequest | None], AgentRequest]
    previous: Callable[[Mapping[str, Any]], str | None]
    reply: Callable[[AgentRequest, Sequence[SentAnswer]], dict[str, Any]]
    events: Callable[[AgentRequest, Sequence[SentAnswer]], Iterator[str]]
    error: Callable[[RequestError], dict[str, Any]]


CHAT = ClientProtocol(
    asked=lambda body, sampling, _: chat_completions.asked(body, sampling),
    previous=lambda body: None,
    reply=chat_completions.reply,
    events=chat_completions.events,
    error=chat_completions.error,
)
RESPONSES = ClientProtocol(
    asked=responses.asked,
    previous=responses.previous,
    reply=responses.reply,
    events=responses.events,
    error=chat_completions.error,
)
MESSAGES = ClientProtocol(
    asked=messages.asked,
    previous=messages.previous,
    reply=messages.reply,
    events=messages.events,
    error=messages.error,
)
PROTOCOLS = {"chat/completions": CHAT, "responses": RESPONSES, "messages": MESSAGES}


class EpisodeServer:
    """Serves the episodes that are open, on an event loop that is running.

    Invariants:
        - ``episodes`` has exactly the episodes that are open, by their keys.
        - It is bound to loopback, at a port that the system chose.
    """

    def __init__(self, model_name: str, sampling: Sampling) -> None:
        """Bind a port. ``sampling`` is how the run draws tokens, whatever requests say."""
        self.model_name = model_name
        self.sampling = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        self.episodes: dict[str, Episode] = {}
        self.socket = socket.create_server((LOOPBACK, 0))
        self.serving: asyncio.Task[None] | None = None
        self.server: Any = None

    @property
    def base_url(self) -> str:
        """Return the address that clients are given."""
        return f"http://{LOOPBACK}:{self.socket.getsockname()[1]}/v1"

    def start(self) -> None:
        """Serve from now on.

        Raises:
            RunError: the packages of a server are not installed.
        """
        if self.serving is not None:
            return
        try:
            import uvicorn

            app = self._app()
        except ModuleNotFoundError as error:
            raise RunError(f"an agent's requests need a server: {absent_module(error)}") from error
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=600,
        )
        self.server = uvicorn.Server(config)
        self.serving = asyncio.ensure_future(self.server.serve(sockets=[self.socket]))

    def open(self, episode: Episode) -> None:
        """Let an episode's key open it."""
        self.episodes[episode.key] = episode

    def close_episode(self, episode: Episode) -> None:
        """End an episode: its key opens nothing any more."""
        self.episodes.pop(episode.key, None)
        episode.close()

    async def close(self) -> None:
        """End all episodes and the server."""
        for episode in [*self.episodes.values()]:
            self.close_episode(episode)
        if self.serving is not None:
            self.server.should_exit = True
            self.server.force_exit = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self.serving, CLOSING)
        self.socket.close()

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = []
        for prefix in ("/v1", "/v1/v1"):
            for path, protocol in PROTOCOLS.items():
                routes.append(Route(f"{prefix}/{path}", self._handler(protocol), methods=["POST"]))
            count = self._handler(MESSAGES, counts_only=True)
            routes.append(Route(f"{prefix}/messages/count_tokens", count, methods=["POST"]))
            routes.append(Route(f"{prefix}/models", self._models, methods=["GET"]))
        return Starlette(routes=routes)

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        try:
            self._episode(request.headers)
        except RequestError as problem:
            return JSONResponse(chat_completions.error(problem), problem.status)
        model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "rlgraph"}
        return JSONResponse({"object": "list", "data": [model]})

    def _handler(self, protocol: ClientProtocol, counts_only: bool = False) -> Callable[[Any], Any]:
        from starlette.responses import JSONResponse, StreamingResponse

        async def handle(request: Any) -> Any:
            try:
                episode = self._episode(request.headers)
                raw = await _read(request)
                asked = self._asked(protocol, episode, raw)
                if counts_only:
                    return JSONResponse({"input_tokens": episode.prompt_length(asked)})
                digest = hashlib.sha256(request.url.path.encode() + raw).digest()
                is_retry = request.headers.get(RETRY_HEADER, "0") != "0"
                answers = await episode.answer(asked, digest, is_retry)
            except RequestError as problem:
                return JSONResponse(protocol.error(problem), problem.status)
            except asyncio.CancelledError:
                over = RequestError("this episode is over", "episode_over", 401)
                return JSONResponse(protocol.error(over), over.status)
            if asked.stream:
                return StreamingResponse(protocol.events(asked, answers), media_type="text/event-stream")
            return JSONResponse(protocol.reply(asked, answers))

        return handle

    def _episode(self, headers: Mapping[str, str]) -> Episode:
        """Return the episode that a request's key opens.

        Raises:
            RequestError: it opens none.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        keys = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            keys.append(token.strip())
        for key in keys:
            if key in self.episodes:
                return self.episodes[key]
        raise RequestError("the key opens no episode, or one that is over", "invalid_api_key", 401)

    def _asked(self, protocol: ClientProtocol, episode: Episode, raw: bytes) -> AgentRequest:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RequestError("the body is not JSON") from error
        if not isinstance(body, dict):
            raise RequestError("the body must be an object")
        before = episode.before(protocol.previous(body))
        return protocol.asked(body, self.sampling, before)


async def _read(request: Any) -> bytes:
    """Return a request's body.

    Raises:
        RequestError: it is too long.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise RequestError(f"a request has at most {MOST_BYTES >> 20} MiB", "too_large", 413)
    return body
