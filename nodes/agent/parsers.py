r"""Parsers of tool calls in the policy's text, one per format that models were taught.

    hermes   <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>        Hermes 2 Pro, Qwen2.5, Qwen3
    json     {"name": "f", "parameters": {"x": 1}}, or a list of such           Llama 3.1
    qwen     <tool_call><function=f><parameter=x>\n1\n</parameter></function></tool_call>     Qwen3-Coder

A parser never raises: a call that it can't read has an ``error``, which the policy gets to read. Calls inside
of thinking are no calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlgraph.nodes.support.thinking import outside_thinking

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
DECODER = json.JSONDecoder()
BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FENCE = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\Z", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A tool call with its arguments, or the reason why they can't be read."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def hermes(text: str) -> list[ToolCall]:
    """Return calls written as JSON between <tool_call> and </tool_call>; a turn may hold several.

    Source: https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B.

    Example:
        >>> hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    text = outside_thinking(text)
    calls: list[ToolCall] = []
    start = text.find(OPENING)
    while start >= 0:
        start += len(OPENING)
        end = _json_end(text, start)
        closing = text.find(CLOSING, end)
        stop = len(text) if closing < 0 else closing
        calls.append(_call(text[start:stop]))
        start = text.find(OPENING, stop)
    return calls


def plain_json(text: str) -> list[ToolCall]:
    """Return the calls of a turn that is one JSON object {"name", "arguments" or "parameters"}, or a list.

    It may stand in a fenced block. A turn that is anything else calls nothing. Source: https://www.llama.com/docs.

    Example:
        >>> plain_json('[{"name": "add", "parameters": {"a": 1}}]')[0].arguments, plain_json("[1, 2]")
        ({'a': 1}, [])
    """
    text = outside_thinking(text)
    fenced = FENCE.match(text.strip())
    parsed = _loaded(fenced[1] if fenced else text)
    calls = parsed if isinstance(parsed, list) else [parsed]
    named = all(isinstance(call, dict) and "name" in call for call in calls)
    return [_read(call) for call in calls] if named else []


def qwen(text: str) -> list[ToolCall]:
    r"""Return calls written as <function=NAME> with one <parameter=NAME> each, within <tool_call>.

    Values are text: the toolbox reads those as JSON whose parameter takes no text. Source: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.

    Example:
        >>> qwen("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>")
        [ToolCall(name='add', arguments={'a': '1'}, error='')]
    """
    calls = []
    for block in BLOCK.findall(outside_thinking(text)):
        functions = FUNCTION.findall(block)
        calls += [ToolCall(name.strip(), dict(PARAMETER.findall(inside))) for name, inside in functions]
        if not functions:
            calls.append(ToolCall("", error="a call must hold <function=NAME>...</function>"))
    return calls


def _json_end(text: str, start: int) -> int:
    """Return where the JSON at a place ends, whose texts may hold closing tags; the place if it is none."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return start


def _call(block: str) -> ToolCall:
    try:
        return _read(json.loads(block))
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"the call is not JSON: {error}")


def _read(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", error='a call must be {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's own form: JSON in a string
        arguments = _loaded(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], error="the arguments must be an object: {name: value}")
    return ToolCall(call["name"], arguments)


def _loaded(text: str) -> Any:
    """Return what a text says as JSON, or None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
