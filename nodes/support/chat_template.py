"""Chat templates rendered, and cut where the contents of messages stand: each side is tokenised for itself.

    rendered text   <|im_start|>user\\nJudge this: MARK<|im_end|>\\n<|im_start|>assistant\\n
    pieces          └─ piece 0 ────────────────┘    └─ piece 1 ─────────────────────┘

Control tokens are read in the pieces alone. So no content can end its message, or speak for somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlgraph.errors import RunError

REMEDY = "give another with template_options: {chat_template: ...}"


class TemplateError(RunError):
    """A chat template can't write some messages; the text names it and says what to do."""


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None) -> str:
    """Return what a tokenizer's chat template writes for messages, up to where the next turn begins.

    Raises:
        TemplateError: it raises an error of any kind: a template is a program that came with the model.
    """
    try:
        written = {**(options or {}), "tokenize": False, "add_generation_prompt": True}
        return str(tokenizer.apply_chat_template(messages, **written))
    except Exception as error:
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        law = f"the chat template of {tokenizer.name_or_path} can't write {roles}"
        raise TemplateError(f"{law}: {type(error).__name__}: {error}; {REMEDY}") from error


def pieces_between(tokenizer: Any, text: str, marks: Sequence[str]) -> list[str]:
    """Return the pieces of a rendered text before, between and behind marks, which come in this order.

    Raises:
        TemplateError: the text does not hold each mark once.
    """
    pieces = [text]
    for mark in marks:
        before, match, after = pieces.pop().rpartition(mark)
        if not match or mark in before:
            law = f"the chat template of {tokenizer.name_or_path} does not write each message once"
            raise TemplateError(f"{law}; {REMEDY}")
        pieces += [before, after]
    return pieces


def content_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a content, in which no control token is read as such."""
    encoding = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
    return list(encoding["input_ids"])


def joined(pieces: Sequence[Sequence[int]], contents: Sequence[Sequence[int]]) -> list[int]:
    """Return pieces with a content between each and the next.

    Example:
        >>> joined([[1], [2, 3], []], [[7], [8]])
        [1, 7, 2, 3, 8]
    """
    first, *rest = pieces
    ids = list(first)
    for content, piece in zip(contents, rest, strict=True):
        ids += [*content, *piece]
    return ids
