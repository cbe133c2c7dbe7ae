"""Finds out how a chat template reads messages: arguments of calls as mappings or texts, and which keys."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlgraph.nodes.support.chat_template import REMEDY, TemplateError, rendered
from rlgraph.nodes.support.row_form import TRAIN

LINKS = ("tool_call_id", "id")  # which call a message answers: templates may go by the order instead
PROBE = {"probe-argument": "probe-value"}


def source_of_template(tokenizer: Any, options: Mapping[str, Any] | None) -> str:
    """Return the text of the chat templates that a tokenizer and the options of a row name."""
    return str((options or {}).get("chat_template", tokenizer.chat_template))


def options_of_template(tokenizer: Any, source: str) -> dict[str, str]:
    """Return the options that name a template, where it is not the tokenizer's own."""
    return {} if source == str(tokenizer.chat_template) else {"chat_template": source}


def for_template(
    tokenizer: Any, talk: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return messages as a template takes them: with arguments as JSON where it writes texts alone."""
    messages = []
    for message in talk:
        messages.append({key: value for key, value in message.items() if key != TRAIN})
    calls_tools = any("tool_calls" in message for message in messages)
    if not calls_tools or not _takes_texts(tokenizer, source_of_template(tokenizer, options)):
        return messages
    return [_in_texts(message) for message in messages]


def _in_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls, if there are any, have their arguments as texts of JSON."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


@functools.lru_cache(maxsize=16)
def _takes_texts(tokenizer: Any, source: str) -> bool:
    """Return whether a template can't write a mapping of arguments as JSON, but a text of JSON.

    It raises an error (DeepSeek V3 concatenates them), or writes the mapping as Python does.
    """
    call = {"id": "000000000", "type": "function", "function": {"name": "probe", "arguments": PROBE}}
    question = {"role": "user", "content": "a question"}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    options = options_of_template(tokenizer, source)
    try:
        text = rendered(tokenizer, [question, calls], options, begun=False)
    except TemplateError:
        text = repr(PROBE)
    if repr(PROBE) not in text:
        return False
    try:
        return json.dumps(PROBE) in rendered(tokenizer, [question, _in_texts(calls)], options, begun=False)
    except TemplateError:
        return False


def refuse_unread(
    tokenizer: Any,
    talk: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None,
    learnt: Sequence[int] = (),
) -> None:
    """Refuse messages with a key that makes no difference to what a template writes.

    A key of a turn that is not learnt may be left out by a template that knows it: thoughts of earlier turns.

    Raises:
        TemplateError: there is one.
    """
    source = source_of_template(tokenizer, options)
    written = None
    for place, message in enumerate(talk):
        is_learnt = place in learnt
        for key in message:
            if _needs_not_be_written(key, message["role"]):
                continue
            if key in source and not is_learnt:
                continue
            if written is None:
                written = rendered(tokenizer, talk, options, begun=False)
            without_key = {name: value for name, value in message.items() if name != key}
            changed = [*talk[:place], without_key, *talk[place + 1 :]]
            try:
                makes_difference = rendered(tokenizer, changed, options, begun=False) != written
            except TemplateError:
                makes_difference = True
            if not makes_difference:
                law = f"the chat template of {tokenizer.name_or_path} does not write {key!r} of turn "
                law += f"{place + 1}"
                raise TemplateError(f"{law}; {REMEDY}, or take the key out of the rows")


def _needs_not_be_written(key: str, role: str) -> bool:
    """Return whether a template may leave a key out, or is known to write it."""
    if key in ("role", "content", *LINKS):
        return True
    return key == "name" and role == "tool"
