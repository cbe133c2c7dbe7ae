"""Chat templates rendered, and cut where the contents of messages stand: each side is tokenised for itself.

    rendered text   <|im_start|>user\\nJudge this: MARK<|im_end|>\\n<|im_start|>assistant\\n
    pieces          └─ piece 0 ────────────────┘    └─ piece 1 ─────────────────────┘

Control tokens are read in the pieces alone. So no content can end its message, or speak for somebody else.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from rlgraph.errors import RunError

Template = Literal["chat", "plain"]
CutSide = Literal["left", "right", "middle"]
REMEDY = "give another with template_options: {chat_template: ...}"


class TemplateError(RunError):
    """A chat template can't write some messages; the text names it and says what to do."""


def rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None,
    begun: bool = True,
) -> str:
    """Return what a tokenizer's chat template writes for messages, with the policy's next turn begun or not.

    Raises:
        TemplateError: it raises an error of any kind: a template is a program that came with the model.
    """
    (text,) = rendered_at_once(tokenizer, [messages], options, begun)
    return text


def rendered_at_once(
    tokenizer: Any,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    options: Mapping[str, Any] | None,
    begun: bool = True,
) -> list[str]:
    """Return what ``rendered`` does for each of several conversations, in less time."""
    try:
        arguments = {**(options or {}), "tokenize": False, "add_generation_prompt": begun}
        return [*map(str, tokenizer.apply_chat_template([*conversations], **arguments))]
    except Exception as error:
        roles: dict[str, None] = {}  # each once, in their order
        for messages in conversations:
            roles |= dict.fromkeys(str(message["role"]) for message in messages)
        law = f"the chat template of {tokenizer.name_or_path} can't write {', '.join(roles)}"
        raise TemplateError(f"{law}: {type(error).__name__}: {error}; {REMEDY}") from error


def pieces_between(tokenizer: Any, text: str, marks: Sequence[str]) -> list[str]:
    """Return the pieces of a rendered text before, between and behind marks, which come in this order.

    Raises:
        TemplateError: the text does not hold each mark once.
    """
    texts_between = [text]
    for mark in marks:
        text_before, match, text_after = texts_between.pop().rpartition(mark)
        if not match or mark in text_before:
            law = f"the chat template of {tokenizer.name_or_path} does not write each message once"
            raise TemplateError(f"{law}; {REMEDY}")
        texts_between += [text_before, text_after]
    return texts_between


def well_formed(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair, which no tokenizer or file takes.

    Example:
        >>> well_formed("bad \\ud83d half")
        'bad \ufffd half'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def content_ids(tokenizer: Any, text: str, around: str) -> list[int]:
    """Return the token ids of a content, in which no control token is read as such.

    These are the tokenizer's special tokens, and of the others that were added to its vocabulary those which
    the text ``around`` the content has: some models do not call theirs special.
    """
    text = well_formed(text)
    ids = _ids(tokenizer, text)
    added = _added(tokenizer)
    texts_of_added = {added[token] for token in {*ids} & added.keys()}
    controls = [control for control in texts_of_added if control in around]
    if not controls:
        return ids
    # cut behind the first character of each, so that none stands within one part
    cuts = [0]
    for match in re.finditer(f"(?={'|'.join(map(re.escape, controls))})", text):
        cuts.append(match.start() + 1)
    cuts.append(len(text))
    ids = []
    for start, end in pairwise(cuts):
        ids += _ids(tokenizer, text[start:end])
    return ids


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


@functools.lru_cache(maxsize=8)
def _added(tokenizer: Any) -> dict[int, str]:
    """Return the tokens that were added to a tokenizer's vocabulary."""
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}


def joined(texts_between: Sequence[Sequence[int]], contents: Sequence[Sequence[int]]) -> list[int]:
    """Return pieces with a content between each and the next.

    Example:
        >>> joined([[1], [2, 3], []], [[7], [8]])
        [1, 7, 2, 3, 8]
    """
    beginning, *separators = texts_between
    ids = list(beginning)
    for content, separator in zip(contents, separators, strict=True):
        ids += [*content, *separator]
    return ids


def cut(ids: Sequence[int], limit: int, side: CutSide, mark: Sequence[int]) -> list[int]:
    """Return at most ``limit`` ids; ``mark`` replaces those taken out, if it fits.

    Example:
        >>> [cut([1, 2, 3, 4, 5, 6], 4, side, [0]) for side in ("left", "right", "middle")]
        [[0, 4, 5, 6], [1, 2, 3, 0], [1, 2, 0, 6]]
    """
    if len(ids) <= limit:
        return list(ids)
    if len(mark) >= limit:
        mark = []
    room = limit - len(mark)
    head = {"left": 0, "right": room, "middle": (room + 1) // 2}[side]
    return [*ids[:head], *mark, *ids[len(ids) - (room - head) :]]
