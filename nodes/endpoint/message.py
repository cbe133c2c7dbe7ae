"""Messages of a conversation, and what they mean once their form is left out.

Clients send back what the policy wrote in another form. They parse arguments and write them anew, drop
thinking or move it to another field, and strip blanks. ``difference`` compares two messages by what they say:

    recorded   "<think>\\nA sum.\\n</think>\\n\\n"   add {"a":1e3}
    sent       ""                                add {"a": 1000.0}      no difference
    sent       "Let me see."                     add {"a": 1000.0}      "edited"
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlgraph.nodes.support.thinking import split_thinking

INVALID = "INVALID_JSON"  # pydantic-ai 2.62 sends arguments that are no JSON back as {"INVALID_JSON": text}


@dataclass(frozen=True)
class SentCall:
    """A call of a tool: its id, the tool's name, and the arguments as they were written."""

    id: str
    name: str
    arguments: str

    @cached_property
    def meaning(self) -> tuple[str, str]:
        """Return the name and the arguments in a normal form."""
        return self.name, normal_arguments(self.arguments)


@dataclass(frozen=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        text: what it says; without thinking where that is known.
        thinking: what the assistant thought before it.
        calls: the tools that the assistant calls.
        answers: the id of the call that a tool's message answers.
        name: the tool that answers; it is not compared.
    """

    role: str
    text: str = ""
    thinking: str = ""
    calls: Sequence[SentCall] = field(default=())
    answers: str = ""
    name: str = ""

    @cached_property
    def said(self) -> str:
        """Return its text without differences in blanks."""
        text = self.text
        if self.role == "assistant":
            _, text = split_thinking(text)
        return without_blanks(text)

    @cached_property
    def thought(self) -> str:
        """Return its thinking, from whichever place, without differences in blanks."""
        in_text = ""
        if self.role == "assistant":
            in_text, _ = split_thinking(self.text)
        return without_blanks(f"{self.thinking} {in_text}")

    @cached_property
    def called(self) -> list[tuple[str, str]]:
        """Return its calls in their normal form."""
        return [call.meaning for call in self.calls]

    def for_template(self, content: str) -> dict[str, Any]:
        """Return it as chat templates take it, with another text as its content."""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.calls]
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.role == "tool":
            message |= {"tool_call_id": self.answers, "name": self.name or "unknown"}
        return message


def difference(recorded: Message, sent: Message) -> str:
    """Return how a message that was sent differs from one that was recorded: role, edited, thinking, or "".

    Thinking that a client leaves out is no difference; other thinking is.
    """
    if recorded.role != sent.role:
        return "role"
    if recorded.said != sent.said or recorded.called != sent.called:
        return "edited"
    if recorded.role == "tool" and recorded.answers != sent.answers:
        return "edited"
    if sent.thought and sent.thought != recorded.thought:
        return "thinking"
    return ""


def without_blanks(text: str) -> str:
    """Return a text in which blanks are single spaces, and none are at its ends."""
    return " ".join(text.split())


def normal_arguments(text: str) -> str:
    """Return the arguments of a call in a form that only their values decide; other text as it is.

    Example:
        >>> normal_arguments('{"b": 1e3, "a": "x"}') == normal_arguments('{"a":"x","b":1000}')
        True
        >>> normal_arguments('{"INVALID_JSON": "{a: "}')
        '{a:'
    """
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return without_blanks(text)
    if isinstance(arguments, Mapping) and arguments.keys() == {INVALID}:
        return without_blanks(str(arguments[INVALID]))
    return json.dumps(_normal(arguments), sort_keys=True)


def _normal(value: Any) -> Any:
    """Return a value of JSON in which a whole number is an int, and mappings and lists are plain."""
    if isinstance(value, Mapping):
        return {str(key): _normal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normal(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _call_for_template(call: SentCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):  # templates take mappings alone
        arguments = {INVALID: call.arguments}
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
