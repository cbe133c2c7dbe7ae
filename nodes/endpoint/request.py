"""Requests of clients and their answers, whichever protocol they speak."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rlgraph.nodes.endpoint.message import Message, SentCall
from rlgraph.ops import Generation

MOST_SAMPLES = 64  # of one request


class RequestError(Exception):
    """A request that can't be answered; the client gets the text and a code."""

    def __init__(self, text: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(text)
        self.text, self.code, self.status = text, code, status


@dataclass(frozen=True)
class AgentRequest:
    """A request for the policy's next turn.

    Attributes:
        model: the name that the client gives the model.
        history: the messages so far.
        tools: the tools that are offered, as OpenAI functions.
        max_tokens: the most tokens of the answer; None: as many as the episode has left.
        stop: texts that end the answer.
        samples: how many answers.
        stream: whether they are sent as events.
        wants_usage: whether the events end with the numbers of tokens.
        wants_logprobs: whether each token's log-prob is sent.
        left_out: settings of the request that the run does not follow, by name.
    """

    model: str
    history: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    samples: int = 1
    stream: bool = False
    wants_usage: bool = False
    wants_logprobs: bool = False
    left_out: Sequence[str] = ()

    @cached_property
    def tools_text(self) -> str:
        """Return the tools as one text, by which they are compared."""
        return json.dumps([*self.tools], sort_keys=True) if self.tools else ""


@dataclass(frozen=True)
class SentAnswer:
    """An answer as a client gets it.

    Attributes:
        id: of the response; a later request may name it.
        message: what the policy says.
        finish: stop, tool_calls or length.
        prompt_tokens: how many tokens it read.
        drawn: what the engine drew.
        texts: of the drawn tokens, each on its own.
    """

    id: str
    message: Message
    finish: str
    prompt_tokens: int
    drawn: Generation
    texts: Sequence[str] = field(default=())


def named(history: Sequence[Message]) -> list[Message]:
    """Return messages of which those of tools name the tool of the call that they answer."""
    names: dict[str, str] = {}
    messages = []
    for message in history:
        for call in message.calls:
            names[call.id] = call.name
        if message.role == "tool" and not message.name:
            message = replace(message, name=names.get(message.answers, ""))
        messages.append(message)
    return messages


def text_of(content: Any, where: str) -> str:
    """Return a content as text: a text, null, or a list of parts of text.

    Raises:
        RequestError: it has a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list):
        raise RequestError(f"{where}: a content is a text or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{where}: content of type {kind!r} can't be read; only text can")
        texts.append(text)
    return "".join(texts)


def call_of(call: Any, where: str) -> SentCall:
    """Return a call of OpenAI's chat completions: {id, function: {name, arguments}}.

    Raises:
        RequestError: it is none.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: a call is {{id, function: {{name, arguments}}}}")
    return SentCall(str(call.get("id") or ""), function["name"], arguments_text(function.get("arguments")))


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a call as text: JSON, or whatever the policy wrote."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def number(body: Mapping[str, Any], *names: str, least: int = 1, most: int = 2**31) -> int | None:
    """Return a whole number of a request under the first of some names that it has.

    Raises:
        RequestError: it is not one, or outside of its bounds.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise RequestError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        return value
    return None


def texts(value: Any, name: str) -> tuple[str, ...]:
    """Return a setting that is a text or a list of texts; empty ones are left out.

    Raises:
        RequestError: it is neither.
    """
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise RequestError(f"{name} must be a text or a list of texts")
    return tuple(text for text in values if text)


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return a value that has to be a mapping.

    Raises:
        RequestError: it is not.
    """
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object")
    return value


def items(value: Any, name: str) -> list[Any]:
    """Return a value that has to be a list.

    Raises:
        RequestError: it is not.
    """
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list")
    return value


def differing(body: Mapping[str, Any], names: Mapping[str, Any]) -> list[str]:
    """Return the settings that a request gives with other values than the run has."""
    return [name for name, value in names.items() if body.get(name) not in (None, value)]


def event(data: Any, kind: str = "") -> str:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    beginning = f"event: {kind}\n" if kind else ""
    return f"{beginning}data: {text}\n\n"


def token_bytes(text: str) -> list[int]:
    """Return the bytes of a token's text, as OpenAI's log-probs have them."""
    return [*text.encode("utf-8", "surrogatepass")]
