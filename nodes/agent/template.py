"""Token ids that a chat template writes between two turns of the policy.

What the policy wrote is never rendered or tokenised again. A template is asked what it would write behind a
turn that stands for any other, with messages that stand for any other; its text is cut there:

    ...<|im_start|>assistant\\nTURN<|im_end|>\\n<|im_start|>tool\\nMESSAGE<|im_end|>\\n<|im_start|>assistant\\n
                                └─ piece 0 ──────────────────┘       └─ piece 1 ───────────────────────┘
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.support.chat_template import TemplateError, content_ids, joined, pieces_between, rendered
from rlgraph.nodes.support.template_reads import for_template

TURN, MESSAGE = "a-turn-of-the-policy", "message-number-{}-of-others"


class TemplatePieces:
    """The pieces of one tokenizer's chat template, tokenised once."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.options = tokenizer, dict(options or {})
        self.template = str(self.options.get("chat_template", tokenizer.chat_template))
        self.pieces: dict[str, list[list[int]]] = {}

    def between(
        self, messages: Sequence[tuple[str, str]], contents: Sequence[Sequence[int]], last_id: int
    ) -> list[int]:
        """Return the ids of some messages and of the opening of the policy's next turn.

        A message is its role and its name, empty but for tools. ``contents`` are its own ids. ``last_id`` is
        the id that the policy's turn ended with: the template's end token is left out where that is the same.

        Raises:
            TemplateError: the template can't be cut so.
        """
        marks = [MESSAGE.format(number) for number in range(len(messages))]
        marked = []
        for (role, name), mark in zip(messages, marks, strict=True):
            marked.append(_message(role, name, mark))
        return self.behind_turn(marked, marks, contents, last_id)

    def behind_turn(
        self,
        marked: Sequence[Mapping[str, Any]],
        marks: Sequence[str],
        contents: Sequence[Sequence[int]],
        last_id: int,
    ) -> list[int]:
        """Return the ids of messages as ``between`` does, which hold marks where their contents stand.

        Raises:
            TemplateError: the template can't be cut so.
        """
        key = json.dumps(marked)
        if key not in self.pieces:
            pieces = pieces_between(self.tokenizer, self._rendered(marked), [TURN, *marks])[1:]
            self.pieces[key] = self.tokenizer(pieces, add_special_tokens=False)["input_ids"]
        end_of_turn, *between_messages = self.pieces[key]
        if end_of_turn[:1] == [last_id]:
            end_of_turn = end_of_turn[1:]
        return joined([end_of_turn, *between_messages], contents)

    def content(self, text: str) -> list[int]:
        """Return the ids of a message's text, in which no control token is read as such."""
        return content_ids(self.tokenizer, text, self.template)

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if self.tokenizer.chat_template is None and "chat_template" not in self.options:
            name = self.tokenizer.name_or_path
            raise TemplateError(f"the tokenizer {name} has no chat template, which more than one turn needs")
        start = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": TURN}]
        talk = for_template(self.tokenizer, [*start, *messages], self.options)
        return rendered(self.tokenizer, talk, self.options)


def _message(role: str, name: str, content: str) -> dict[str, str]:
    """Return a message as templates take it; some want a tool's answer to name the call."""
    message = {"role": role, "content": content}
    if name:
        message |= {"name": name, "tool_call_id": "000000000"}
    return message


def unread_call(
    tokenizer: Any,
    options: Mapping[str, Any] | None,
    tool: str,
    parser: Callable[[str], list[ToolCall]],
) -> str:
    """Return how a chat template writes a call of a tool, where a parser does not read it as such.

    It is empty where the parser does, and of a template that writes no calls, which does not tell what the
    policy was taught.
    """
    call = {"id": f"functions.{tool}:0", "type": "function", "function": {"name": tool, "arguments": {}}}
    user_turn = {"role": "user", "content": "a question"}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        talk = for_template(tokenizer, [user_turn, calls], options)
        begin = rendered(tokenizer, talk[:1], options)
        text = rendered(tokenizer, talk, options, begun=False)
    except TemplateError:
        return ""
    turn = text.removeprefix(begin)
    if turn == text or tool not in turn:
        return ""
    ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
    words = tokenizer.decode(ids, skip_special_tokens=True)
    for parsed in parser(words):
        if parsed.name == tool and not parsed.error:
            return ""
    return turn.strip()
