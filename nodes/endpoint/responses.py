"""OpenAI's responses: ``POST /v1/responses``, with whole histories as items or behind an earlier response.

Source: https://platform.openai.com/docs/api-reference/responses, and what openai-agents 0.24 sends: items
with their ids, reasoning items among them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlgraph.nodes.endpoint.message import Message, SentCall
from rlgraph.nodes.endpoint.request import (
    AgentRequest,
    RequestError,
    SentAnswer,
    arguments_text,
    differing,
    event,
    items,
    mapping,
    named,
    number,
    text_of,
)

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def previous(body: Mapping[str, Any]) -> str | None:
    """Return the id of the response that a request goes on behind."""
    previous_id = body.get("previous_response_id")
    return None if previous_id is None else str(previous_id)


def asked(body: Mapping[str, Any], sampling: Mapping[str, Any], before: AgentRequest | None) -> AgentRequest:
    """Return what a request asks for.

    ``sampling`` is how the run draws tokens, whatever a request says. ``before`` has the history that it
    goes on with; instructions and tools are not kept from it, as OpenAI's own service does not.

    Raises:
        RequestError: it can't be read.
    """
    history = []
    instructions = text_of(body.get("instructions"), "instructions")
    if instructions:
        history.append(Message("system", instructions))
    if before is not None:
        had_instructions = bool(before.history) and before.history[0].role == "system"
        history += before.history[1:] if instructions and had_instructions else before.history
    given = body.get("input")
    if isinstance(given, str):
        history.append(Message("user", given))
    else:
        history += _messages(items(given, "input"))
    if not history:
        raise RequestError("input is empty")
    left_out = differing(body, sampling)
    if body.get("tool_choice") not in (None, "auto", "none"):
        left_out.append("tool_choice")
    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    if form not in (None, {"type": "text"}):
        left_out.append("text.format")
    return AgentRequest(
        model=str(body.get("model", "")),
        history=named(history),
        tools=_tools(body),
        max_tokens=number(body, "max_output_tokens"),
        stream=body.get("stream") is True,
        left_out=left_out,
    )


def reply(request: AgentRequest, answers: Sequence[SentAnswer]) -> dict[str, Any]:
    """Return the response to a request."""
    answer = answers[0]
    was_cut = answer.finish == "length"
    return {
        **_head(request, answer),
        "status": "incomplete" if was_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
        "output": _items(answer),
        "usage": _usage(answer),
    }


def events(request: AgentRequest, answers: Sequence[SentAnswer]) -> Iterator[str]:
    """Yield the events of a response that is streamed: each item in one piece."""
    whole = reply(request, answers)
    head = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    sent = [("response.created", {"response": head}), ("response.in_progress", {"response": head})]
    for index, item in enumerate(whole["output"]):
        sent += _item_events(index, item)
    name = "response.incomplete" if whole["incomplete_details"] else "response.completed"
    sent.append((name, {"response": whole}))
    for sequence_number, (kind, data) in enumerate(sent):
        yield event({"type": kind, "sequence_number": sequence_number, **data}, kind)


def _item_events(index: int, item: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    place = {"output_index": index, "item_id": item["id"]}
    begun = {**item, "status": "in_progress"}
    sent: list[tuple[str, dict[str, Any]]] = []
    if item["type"] == "message":
        (part,) = item["content"]
        inside = {**place, "content_index": 0}
        sent.append(("response.output_item.added", {"output_index": index, "item": {**begun, "content": []}}))
        sent.append(("response.content_part.added", {**inside, "part": {**part, "text": ""}}))
        sent.append(("response.output_text.delta", {**inside, "delta": part["text"], "logprobs": []}))
        sent.append(("response.output_text.done", {**inside, "text": part["text"], "logprobs": []}))
        sent.append(("response.content_part.done", {**inside, "part": part}))
    elif item["type"] == "function_call":
        arguments = item["arguments"]
        sent.append(
            ("response.output_item.added", {"output_index": index, "item": {**begun, "arguments": ""}})
        )
        sent.append(("response.function_call_arguments.delta", {**place, "delta": arguments}))
        done = {**place, "arguments": arguments, "name": item["name"]}
        sent.append(("response.function_call_arguments.done", done))
    else:
        sent.append(("response.output_item.added", {"output_index": index, "item": begun}))
    sent.append(("response.output_item.done", {"output_index": index, "item": dict(item)}))
    return sent


def _messages(given: Sequence[Any]) -> list[Message]:
    """Return items as messages: thinking, text and calls that follow each other are one turn."""
    messages: list[Message] = []
    turn: list[Message] = []

    def end_turn() -> None:
        if turn:
            said = "".join(part.text for part in turn)
            thinking = "".join(part.thinking for part in turn)
            calls = tuple(call for part in turn for call in part.calls)
            messages.append(Message("assistant", said, thinking, calls))
            turn.clear()

    for place, item in enumerate(given):
        where = f"input[{place}]"
        message = _message(mapping(item, where), where)
        if message.role == "assistant":
            turn.append(message)
        else:
            end_turn()
            messages.append(message)
    end_turn()
    return messages


def _message(item: Mapping[str, Any], where: str) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        role = ROLES.get(str(item.get("role")))
        if role is None:
            raise RequestError(f"{where}: no role {item.get('role')!r}; there are {', '.join(ROLES)}")
        return Message(role, text_of(item.get("content"), f"{where}.content"))
    if kind == "function_call":
        call = SentCall(
            str(item.get("call_id")), str(item.get("name")), arguments_text(item.get("arguments"))
        )
        return Message("assistant", calls=(call,))
    if kind == "function_call_output":
        return Message("tool", text_of(item.get("output"), where), answers=str(item.get("call_id")))
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return Message("assistant", thinking=text_of(parts, where))
    raise RequestError(f"{where}: an item of type {kind!r} can't be read")


def _tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if body.get("tool_choice") == "none":
        return []
    tools: list[Mapping[str, Any]] = []
    for place, tool in enumerate(body.get("tools") or ()):
        where = f"tools[{place}]"
        if mapping(tool, where).get("type") != "function":
            raise RequestError(
                f"{where}: a tool of type {tool.get('type')!r} can't be offered; only functions can"
            )
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)}
        tools.append({"type": "function", "function": function})
    return tools


def _items(answer: SentAnswer) -> list[dict[str, Any]]:
    message = answer.message
    output: list[dict[str, Any]] = []
    status = "incomplete" if answer.finish == "length" else "completed"
    if message.thinking:
        content = [{"type": "reasoning_text", "text": message.thinking}]
        reasoning = {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": content}
        output.append({**reasoning, "status": status})
    if message.text or not message.calls:
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        said = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "content": [part]}
        output.append({**said, "status": status})
    for place, call in enumerate(message.calls):
        item = {"id": f"fc_{answer.id}_{place}", "type": "function_call", "call_id": call.id}
        output.append({**item, "name": call.name, "arguments": call.arguments, "status": "completed"})
    return output


def _head(request: AgentRequest, answer: SentAnswer) -> dict[str, Any]:
    functions = []
    for tool in request.tools:
        functions.append({"type": "function", "strict": False, "parameters": None, **tool["function"]})
    return {
        "id": answer.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": functions,
    }


def _usage(answer: SentAnswer) -> dict[str, Any]:
    drawn = len(answer.drawn.tokens)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": drawn,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + drawn,
    }
