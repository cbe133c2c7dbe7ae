"""OpenAI's chat completions: ``POST /v1/chat/completions``.

Source: https://platform.openai.com/docs/api-reference/chat, and what openai 3.57, openai-agents 0.24,
pydantic-ai 2.62, langchain 1.5, smolagents 1.26 and litellm 1.110 send.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlgraph.nodes.endpoint.message import Message
from rlgraph.nodes.endpoint.request import (
    MOST_SAMPLES,
    AgentRequest,
    RequestError,
    SentAnswer,
    call_of,
    differing,
    event,
    items,
    mapping,
    named,
    number,
    text_of,
    texts,
    token_bytes,
)

ROLES = {"developer": "system", "function": "tool"}
KNOWN_ROLES = ("system", "user", "assistant", "tool")
THINKING_FIELDS = ("reasoning_content", "reasoning")


def asked(body: Mapping[str, Any], sampling: Mapping[str, Any]) -> AgentRequest:
    """Return what a request asks for. ``sampling`` is how the run draws tokens, whatever a request says.

    Raises:
        RequestError: it can't be read.
    """
    history = []
    for place, message in enumerate(items(body.get("messages"), "messages")):
        history.append(_message(mapping(message, f"messages[{place}]"), f"messages[{place}]"))
    if not history:
        raise RequestError("messages is empty")
    if number(body, "top_logprobs", least=0):
        raise RequestError("top_logprobs: only the log-probs of the drawn tokens are there; leave it out")
    options = body.get("stream_options")
    left_out = differing(body, sampling)
    if body.get("tool_choice") not in (None, "auto", "none"):
        left_out.append("tool_choice")
    if body.get("response_format") not in (None, {"type": "text"}):
        left_out.append("response_format")
    return AgentRequest(
        model=str(body.get("model", "")),
        history=named(history),
        tools=_tools(body),
        max_tokens=number(body, "max_completion_tokens", "max_tokens"),
        stop=texts(body.get("stop"), "stop"),
        samples=number(body, "n", most=MOST_SAMPLES) or 1,
        stream=body.get("stream") is True,
        wants_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        wants_logprobs=body.get("logprobs") is True,
        left_out=left_out,
    )


def reply(request: AgentRequest, answers: Sequence[SentAnswer]) -> dict[str, Any]:
    """Return the response to a request."""
    choices = []
    for index, answer in enumerate(answers):
        choice = {"index": index, "message": _as_json(answer.message), "finish_reason": answer.finish}
        choices.append({**choice, "logprobs": _logprobs(request, answer)})
    return {**_head(request, answers[0], "chat.completion"), "choices": choices, "usage": _usage(answers)}


def events(request: AgentRequest, answers: Sequence[SentAnswer]) -> Iterator[str]:
    """Yield the events of a response that is streamed: each choice in one piece, then how it ended."""
    head = _head(request, answers[0], "chat.completion.chunk")
    for index, answer in enumerate(answers):
        delta = _as_json(answer.message)
        for place, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = place
        chunk = {"index": index, "delta": delta, "finish_reason": None}
        yield event({**head, "choices": [{**chunk, "logprobs": _logprobs(request, answer)}]})
        yield event({**head, "choices": [{"index": index, "delta": {}, "finish_reason": answer.finish}]})
    if request.wants_usage:
        yield event({**head, "choices": [], "usage": _usage(answers)})
    yield event("[DONE]")


def error(problem: RequestError) -> dict[str, Any]:
    """Return a problem as OpenAI's clients read it."""
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    return {"error": {"message": problem.text, "type": kind, "param": None, "code": problem.code}}


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = ROLES.get(str(message.get("role")), str(message.get("role")))
    if role not in KNOWN_ROLES:
        raise RequestError(f"{where}: no role {role!r}; there are {', '.join(KNOWN_ROLES)}")
    calls = []
    for place, call in enumerate(message.get("tool_calls") or ()):
        calls.append(call_of(call, f"{where}.tool_calls[{place}]"))
    thinking = ""
    for name in THINKING_FIELDS:
        if isinstance(message.get(name), str):
            thinking = thinking or message[name]
    return Message(
        role=role,
        text=text_of(message.get("content"), f"{where}.content"),
        thinking=thinking,
        calls=tuple(calls),
        answers=str(message.get("tool_call_id") or ""),
    )


def _tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if body.get("tool_choice") == "none":
        return []
    tools = []
    for place, tool in enumerate(body.get("tools") or ()):
        where = f"tools[{place}]"
        if mapping(tool, where).get("type", "function") != "function":
            raise RequestError(
                f"{where}: a tool of type {tool['type']!r} can't be offered; only functions can"
            )
        mapping(tool.get("function"), f"{where}.function")
        tools.append(tool)
    return tools


def _as_json(message: Message) -> dict[str, Any]:
    result: dict[str, Any] = {"role": "assistant", "content": message.text, "refusal": None}
    if message.thinking:
        result["reasoning_content"] = message.thinking
    if message.calls:
        result["content"] = message.text or None
        result["tool_calls"] = []
        for call in message.calls:
            function = {"name": call.name, "arguments": call.arguments}
            result["tool_calls"].append({"id": call.id, "type": "function", "function": function})
    return result


def _head(request: AgentRequest, answer: SentAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": int(time.time()), "model": request.model}


def _usage(answers: Sequence[SentAnswer]) -> dict[str, Any]:
    prompt_tokens = answers[0].prompt_tokens
    drawn = sum(len(answer.drawn.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": drawn,
        "total_tokens": prompt_tokens + drawn,
    }


def _logprobs(request: AgentRequest, answer: SentAnswer) -> dict[str, Any] | None:
    if not request.wants_logprobs:
        return None
    content = []
    for text, logprob in zip(answer.texts, answer.drawn.logprobs, strict=True):
        content.append({"token": text, "logprob": logprob, "bytes": token_bytes(text), "top_logprobs": []})
    return {"content": content, "refusal": None}
