"""Anthropic's messages: ``POST /v1/messages``, threads too.

Source: https://docs.anthropic.com/en/api/messages, and what anthropic 2.14 sends: its tool runner opens a
thread (``thread: {type: create}``), and then sends nothing but what is new (``{type: continue,
previous_message_id: ID}``): neither the system prompt nor the tools nor earlier messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlgraph.nodes.endpoint.message import Message, SentCall
from rlgraph.nodes.endpoint.request import (
    AgentRequest,
    RequestError,
    SentAnswer,
    differing,
    event,
    items,
    mapping,
    named,
    number,
    text_of,
    texts,
)

FINISHES = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
OTHER_TOOLS = "only tools with an input_schema can be offered, which the client runs"


def previous(body: Mapping[str, Any]) -> str | None:
    """Return the id of the message that a request goes on behind, without repeating what came before.

    Raises:
        RequestError: it names a thread in a way that is not known.
    """
    thread = body.get("thread")
    if thread is None or mapping(thread, "thread").get("type") == "create":
        return None
    previous_id = thread.get("previous_message_id")
    if thread.get("type") != "continue" or not isinstance(previous_id, str):
        law = "thread is {type: create}, or {type: continue, previous_message_id: ID}"
        raise RequestError(f"{law}; with thread=False the client sends whole histories")
    return previous_id


def asked(body: Mapping[str, Any], sampling: Mapping[str, Any], before: AgentRequest | None) -> AgentRequest:
    """Return what a request asks for.

    ``sampling`` is how the run draws tokens, whatever a request says. ``before`` has the history and the
    tools of the thread that it goes on with.

    Raises:
        RequestError: it can't be read.
    """
    history = list(before.history) if before else []
    system = text_of(body.get("system"), "system")
    if system:
        history.append(Message("system", system))
    for place, message in enumerate(items(body.get("messages"), "messages")):
        where = f"messages[{place}]"
        history += _messages(mapping(message, where), where)
    if not history:
        raise RequestError("messages is empty")
    tools = _tools(body)
    if before is not None and not tools:
        tools = list(before.tools)
    left_out = differing(body, sampling)
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") not in ("auto", "none"):
        left_out.append("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "none":
        tools = []
    return AgentRequest(
        model=str(body.get("model", "")),
        history=named(history),
        tools=tools,
        max_tokens=number(body, "max_tokens"),
        stop=texts(body.get("stop_sequences"), "stop_sequences"),
        stream=body.get("stream") is True,
        left_out=left_out,
    )


def reply(request: AgentRequest, answers: Sequence[SentAnswer]) -> dict[str, Any]:
    """Return the response to a request."""
    answer = answers[0]
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(answer),
        "stop_reason": FINISHES[answer.finish],
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.drawn.tokens)},
    }


def events(request: AgentRequest, answers: Sequence[SentAnswer]) -> Iterator[str]:
    """Yield the events of a response that is streamed: each block in one piece."""
    whole = reply(request, answers)
    usage = whole["usage"]
    start = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield event({"type": "message_start", "message": start}, "message_start")
    for index, block in enumerate(whole["content"]):
        empty, deltas = _streamed(block)
        yield _block_event("content_block_start", index, content_block=empty)
        for delta in deltas:
            yield _block_event("content_block_delta", index, delta=delta)
        yield _block_event("content_block_stop", index)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield event({"type": "message_delta", "delta": end, "usage": usage}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def error(problem: RequestError) -> dict[str, Any]:
    """Return a problem as Anthropic's clients read it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = "api_error" if problem.status >= 500 else kinds.get(problem.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": problem.text}}


def _block_event(kind: str, index: int, **more: Any) -> str:
    return event({"type": kind, "index": index, **more}, kind)


def _messages(message: Mapping[str, Any], where: str) -> list[Message]:
    """Return a message as those that a chat template takes: each result of a tool is one of its own."""
    role = str(message.get("role"))
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}: no role {role!r}; there are user, assistant and system")
    content = message.get("content")
    if isinstance(content, str):
        return [Message(role, content)]
    messages = []
    said = ""
    thinking = ""
    calls = []
    for place, block in enumerate(items(content, f"{where}.content")):
        inside = f"{where}.content[{place}]"
        kind = mapping(block, inside).get("type")
        if kind == "tool_result":
            text = text_of(block.get("content"), inside)
            messages.append(Message("tool", text, answers=str(block.get("tool_use_id"))))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(SentCall(str(block.get("id")), str(block.get("name")), arguments))
        elif kind == "thinking":
            thinking += str(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            said += text_of([block], inside)
    if said or calls or thinking or not messages:
        messages.append(Message(role, said, thinking, tuple(calls)))
    return messages


def _tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tools: list[Mapping[str, Any]] = []
    for place, tool in enumerate(body.get("tools") or ()):
        where = f"tools[{place}]"
        if mapping(tool, where).get("input_schema") is None:
            raise RequestError(f"{where}: {OTHER_TOOLS}")
        function = {"name": str(tool.get("name")), "description": str(tool.get("description") or "")}
        tools.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return tools


def _blocks(answer: SentAnswer) -> list[dict[str, Any]]:
    message = answer.message
    blocks: list[dict[str, Any]] = []
    if message.thinking:
        blocks.append({"type": "thinking", "thinking": message.thinking, "signature": answer.id})
    if message.text or not message.calls:
        blocks.append({"type": "text", "text": message.text, "citations": None})
    for call in message.calls:
        arguments = json.loads(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _streamed(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and what is added to it."""
    if block["type"] == "thinking":
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
        return empty, [thinking, {"type": "signature_delta", "signature": block["signature"]}]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
