r"""Parsers of tool calls in the policy's text, one per format that models were taught.

    hermes   <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>        Hermes 2 Pro, Qwen2.5, Qwen3
    json     {"name": "f", "parameters": {"x": 1}}, or a list of such           Llama 3.1
    qwen     <tool_call><function=f><parameter=x>\n1\n</parameter></function></tool_call>     Qwen3-Coder

A parser never raises: a call that it can't read has an ``error``, which the policy gets to read. Calls inside
of thinking do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlgraph.nodes.support.thinking import without_thinking

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
DECODER = json.JSONDecoder()
FENCE = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\Z", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\n]+)>")
FUNCTION_END = "</function>"
BLOCK = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
PARAMETER_BEGIN = "<parameter="
# a value goes on to its closing tag, or to the line that begins the next one where the tag was forgotten
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)(?:\n?</parameter>|(?=\n<parameter=))", re.DOTALL)
CALL_KEYS = {"name", "arguments", "parameters", "type", "id"}


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
    text = without_thinking(text)
    calls: list[ToolCall] = []
    start = text.find(OPENING)
    while start >= 0:
        start += len(OPENING)
        end = _json_end(text, start)
        stop = _find_or_end(text, CLOSING, end)
        calls.append(_call(text[start:stop]))
        start = text.find(OPENING, stop)
    return calls


def plain_json(text: str) -> list[ToolCall]:
    """Return the calls of a turn that is one JSON object {"name", "arguments" or "parameters"}, or a list.

    It may be in a fenced block. A turn with any other content calls nothing. Source:
    https://www.llama.com/docs.

    Example:
        >>> plain_json('[{"name": "add", "parameters": {"a": 1}}]')[0].arguments, plain_json("[1, 2]")
        ({'a': 1}, [])
    """
    text = without_thinking(text)
    fenced = FENCE.match(text.strip())
    parsed = _loaded(fenced[1] if fenced else text)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(map(_is_call, calls)):
        return []
    return [_call_of_json(call) for call in calls]


def _is_call(value: Any) -> bool:
    """Return whether JSON is a call: an answer may be an object with a name, too."""
    if not isinstance(value, dict):
        return False
    has_arguments = "arguments" in value or "parameters" in value
    return "name" in value and has_arguments and value.keys() <= CALL_KEYS


def qwen(text: str) -> list[ToolCall]:
    r"""Return calls written as <function=NAME> with one <parameter=NAME> each, within <tool_call>.

    Values are text; the toolbox parses a value as JSON if its parameter does not take text. If a turn has no
    tag <tool_call>, which the models sometimes forget, functions count as calls without it. Source:
    https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.

    Example:
        >>> qwen("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>")
        [ToolCall(name='add', arguments={'a': '1'}, error='')]
    """
    text = without_thinking(text)
    start = text.find(OPENING)
    if start < 0:
        return _functions(text, 0)[0]
    calls: list[ToolCall] = []
    while start >= 0:
        functions, stop = _functions(text, start + len(OPENING))
        calls += functions or [ToolCall("", error="a call must hold <function=NAME>...</function>")]
        start = text.find(OPENING, stop)
    return calls


def beside_calls(text: str) -> str:
    r"""Return what a turn that calls tools says beside its calls.

    A turn in a format of one's own is returned whole.

    Example:
        >>> beside_calls('Let me see. <tool_call>{"name": "add"}</tool_call>')
        'Let me see. '
        >>> beside_calls('[{"name": "add"}]')
        ''
    """
    if OPENING in text:
        return BLOCK.sub("", text)
    function = FUNCTION.search(text)
    if function:
        return text[: function.start()]
    is_json = text.lstrip().startswith(("{", "[", "```"))
    return "" if is_json else text


def _functions(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Return the functions that are called from a place on, up to the tag that ends them, and its place."""
    calls: list[ToolCall] = []
    while True:
        end = min(_find_or_end(text, CLOSING, start), _find_or_end(text, OPENING, start))
        function = FUNCTION.search(text, start, end)
        if function is None:
            return calls, end
        call, start = _function(text, function[1].strip(), function.end())
        calls.append(call)


def _find_or_end(text: str, tag: str, start: int) -> int:
    """Return where a tag stands in a text, or the text's end."""
    place = text.find(tag, start)
    return len(text) if place < 0 else place


def _function(text: str, name: str, start: int) -> tuple[ToolCall, int]:
    """Return a call of a function whose parameters begin at a place, and where they end.

    A value may hold any of the other tags.
    """
    arguments: dict[str, str] = {}
    while True:
        end = _find_or_end(text, FUNCTION_END, start)
        begin = text.find(PARAMETER_BEGIN, start, end)
        if begin < 0:
            has_other_text = bool(text[start:end].strip())
            if has_other_text and not arguments:
                error = "a call must hold <parameter=NAME>...</parameter>"
                return ToolCall(name, arguments, error), end
            return ToolCall(name, arguments), end
        parameter = PARAMETER.match(text, begin)
        if parameter is None:
            return ToolCall(name, arguments, error="a parameter is not closed by </parameter>"), end
        arguments[parameter[1]] = parameter[2]
        start = parameter.end()


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
        return _call_of_json(json.loads(block))
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"the call is not JSON: {error}")


def _call_of_json(call: Any) -> ToolCall:
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
