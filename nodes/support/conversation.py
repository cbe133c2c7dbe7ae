"""Rows as conversations: what the policy is asked, what it answered, and what of that is learnt.

question     text, or chat messages {role, content, tool_calls, ...}
answer       text, or the messages behind the question; null: the assistant's turn that ends the question

             user ─ assistant ─ tool ─ assistant
last                                   learnt       assistant_turns
all                 learnt             learnt
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from rlgraph.nodes.support.chat_template import REMEDY, TemplateError, rendered, rendered_at_once
from rlgraph.nodes.support.row_field import DataError, given

Template = Literal["chat", "plain"]
Turns = Literal["last", "all"]
Messages = list[dict[str, Any]]
Question = str | Messages
TextPiece = tuple[str, bool]  # a text, and whether it is learnt
GENERATION = re.compile(r"\{%-?\s*generation\b")  # a template that tells itself what the assistant wrote


@dataclass(frozen=True)
class ReadingOptions:
    """Attributes of all sources that say how rows become prompts. See ``rlgraph.nodes.data.prompts``."""

    question: str | None = "question"  # None: what the answer begins with as ``other`` does
    answer: str | None = "answer"
    answer_after: str | None = None
    template: Template = "chat"
    template_options: Mapping[str, Any] | None = None
    row_tools: str | None = None
    system: str | None = None
    suffix: str = ""
    where: Mapping[str, Any] | None = None
    columns: Mapping[str, Any] | None = None
    assistant_turns: Turns = "last"
    other: str | None = None

    @property
    def named(self) -> list[str]:
        """Return the paths of the fields that every row has to have, ``columns`` aside."""
        named = [self.question, self.answer, self.other, self.row_tools, *(self.where or ())]
        return [*dict.fromkeys(path for path in named if path is not None)]


@dataclass(frozen=True)
class Asked:
    """A row as a question and its answer; ``turns`` are both as messages, if there is more to learn."""

    place: str
    question: Question
    answer: str
    options: Mapping[str, Any] | None  # of the chat template
    turns: Sequence[dict[str, Any]] = ()
    first: int = 0  # the first of the turns that may be learnt

    @property
    def words(self) -> str:
        """Return the question as text; of a conversation, the last message."""
        return self.question if isinstance(self.question, str) else str(self.question[-1]["content"])


def asked(place: str, row: Mapping[str, Any], reading: ReadingOptions) -> Asked:
    """Return a row as a question and its answer.

    Raises:
        DataError: it lacks one, or one is neither text nor messages.
    """
    question, after, options = *_sides(place, row, reading), _options(place, row, reading)
    if isinstance(after, str):
        return Asked(place, question, after, options)
    if not isinstance(question, list):
        question = [{"role": "user", "content": question}]
    talk, first = [*question, *after], len(question) if reading.answer else 0
    if talk[-1]["role"] != "assistant":
        if reading.answer is None:
            return Asked(place, question, "", options)
        law = f"{place}: {reading.answer!r} does not end with the assistant's turn"
        raise DataError(f"{law}; correct the row")
    *before, last = talk
    if not before:
        raise DataError(f"{place}: the conversation has nothing before the assistant's turn; add a question")
    answer = _answer(place, last["content"], reading)
    alone = reading.assistant_turns == "last" and not last.get("tool_calls")
    # question and answer say it all where the last turn is a text, and alone is learnt
    return Asked(place, before, answer, options, () if alone else talk, first)


def _sides(place: str, row: Mapping[str, Any], reading: ReadingOptions) -> tuple[Question, Question]:
    """Return what comes before the answer, and the answer; without a column for it, no messages."""
    if reading.question is None:
        own, other = (given(place, row, str(path)) for path in (reading.answer, reading.other))
        turns, others = (_checked(place, str(reading.answer), side, reading) for side in (own, other))
        if isinstance(turns, str):
            law = f"{place}: {reading.answer!r} is a text, and so there is no question"
            raise DataError(f"{law}; name its column with question:")
        common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(turns, others, strict=False))])
        return turns[:common], turns[common:]
    question = _checked(place, reading.question, given(place, row, reading.question), reading)
    if reading.answer is None:
        return question, "" if isinstance(question, str) else []
    answer = given(place, row, reading.answer)
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        return question, _checked(place, reading.answer, answer, reading)
    return question, _answer(place, answer, reading)


def _checked(place: str, path: str, value: Any, reading: ReadingOptions) -> Question:
    """Return a question or an answer as text, or as messages without empty keys; their content is a text."""
    if isinstance(value, str):
        return value
    fits = isinstance(value, list) and value and all(isinstance(m, dict) for m in value)
    if not (fits and all(isinstance(m.get("role"), str) and _has_content(m) for m in value)):
        law = f"{place}: {path!r} is neither text nor a list of messages {{role, content}}, "
        law += f"but {str(value)[:60]!r}"
        raise DataError(f"{law}; correct the row, or name another column with question:")
    if reading.template == "plain":
        raise DataError(f"{place}: {path!r} holds chat messages; set template: chat")
    return [{"role": m["role"], "content": m.get("content") or "", **_full(m)} for m in value]


def _has_content(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, str) or bool(content is None and message.get("tool_calls"))


def _full(value: Any) -> Any:
    """Return a value without the nulls in its mappings: files of Arrow have each key in every row."""
    if isinstance(value, list):
        return [*map(_full, value)]
    return {k: _full(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _answer(place: str, answer: Any, reading: ReadingOptions) -> str:
    if answer is None:
        raise DataError(f"{place}: {reading.answer!r} is empty; fill it in, or remove the row")
    nested, marker = isinstance(answer, dict | list), reading.answer_after
    words = json.dumps(answer, ensure_ascii=False) if nested else str(answer)
    if marker is None:
        return words
    if marker not in words:
        law = f"{place}: no {marker!r} in {reading.answer!r}: {words[-60:]!r}"
        raise DataError(f"{law}; correct answer_after:")
    return words.rpartition(marker)[2].strip()


def _options(place: str, row: Mapping[str, Any], reading: ReadingOptions) -> Mapping[str, Any] | None:
    """Return the options of the chat template, among the tools of which are those of the row alone."""
    if reading.row_tools is None:
        return reading.template_options
    options = reading.template_options or {}
    known = {tool["function"]["name"]: tool for tool in options.get("tools", ())}
    own = _full(given(place, row, reading.row_tools)) or []
    for tool in own:
        if isinstance(tool, str) and tool not in known:
            law = f"{place}: {reading.row_tools!r} names {tool!r}, which is none of tools: {', '.join(known)}"
            raise DataError(f"{law}; correct the row, or offer it")
    tools = [known[tool] if isinstance(tool, str) else tool for tool in own]
    return {**options, "tools": tools or None}


def written(
    tokenizer: Any, reading: ReadingOptions, question: Question, options: Mapping[str, Any] | None = None
) -> str:
    """Return a question as the text of a prompt; ``options`` stand for the reading's own.

    Raises:
        DataError: the tokenizer has no chat template, and the reading wants one.
        TemplateError: its chat template can't write the question.
    """
    if reading.template == "plain":
        return f"{reading.system or ''}{question}{reading.suffix}"
    (text,) = written_at_once(tokenizer, reading, [question], options)
    return text


def written_at_once(
    tokenizer: Any,
    reading: ReadingOptions,
    questions: Sequence[Question],
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return questions as the chat template writes them; arguments and errors as those of ``written``."""
    options = options or reading.template_options or {}
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise DataError(f"the tokenizer {tokenizer.name_or_path} has no chat template; set template: plain")
    return rendered_at_once(tokenizer, [_conversation(reading, each) for each in questions], options)


def _conversation(reading: ReadingOptions, question: Question) -> Messages:
    """Return chat messages; ``system`` and ``suffix`` are added to a given conversation too, where set."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    if reading.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": reading.system}, *messages]
    *before, last = messages
    return [*before, {**last, "content": last["content"] + reading.suffix}]


def pieces_of(tokenizer: Any, reading: ReadingOptions, row: Asked) -> list[TextPiece]:
    """Return a row as texts, each of which is learnt or not, and tokenised for itself, as in a rollout.

    A turn begins where the template has the policy begin, and ends with the end token.

    Raises:
        TemplateError: the template writes a turn otherwise once there are others behind it.
    """
    if not row.turns:
        return [(written(tokenizer, reading, row.question, row.options), False), (row.answer, True)]
    *before, last = row.turns
    talk = [*_conversation(reading, before), last]
    first = row.first + len(talk) - len(row.turns)
    learnt = [place for place in range(first, len(talk)) if talk[place]["role"] == "assistant"]
    whole, end = rendered(tokenizer, talk, row.options, begun=False), 0
    pieces: list[TextPiece] = []
    for place in learnt if reading.assistant_turns == "all" else learnt[-1:]:
        begin = rendered(tokenizer, talk[:place], row.options)
        if not whole.startswith(begin):
            law = f"the chat template of {tokenizer.name_or_path} does not write turn {place + 1} of a "
            law += "conversation as it has it begun, so what is learnt can't be told"
            raise TemplateError(f"{law}; {REMEDY}, in which {{% generation %}} marks it")
        behind = rendered(tokenizer, talk[: place + 1], row.options, begun=False)
        turn = _to_end(tokenizer, whole, len(begin), behind)
        pieces += [(whole[end : len(begin)], False), (turn, True)]
        end = len(begin) + len(turn)
    return pieces


def _to_end(tokenizer: Any, whole: str, begin: int, behind: str) -> str:
    """Return a turn of a rendered conversation, its end token included if the template writes one."""
    stop = tokenizer.eos_token
    if (place := whole.find(stop, begin)) >= 0:
        return whole[begin : place + len(stop)]
    return whole[begin : len(behind)] if whole.startswith(behind) else whole[begin:]


def marked_by_template(
    tokenizer: Any, reading: ReadingOptions, row: Asked
) -> tuple[list[int], list[bool]] | None:
    """Return ids and what is learnt of them, as a template with {% generation %} says; None of another."""
    options = dict(row.options or {})
    source = str(options.get("chat_template", tokenizer.chat_template))
    if not (row.turns and row.first == 0 and reading.assistant_turns == "all" and GENERATION.search(source)):
        return None
    *before, last = row.turns
    options |= {"return_dict": True, "return_assistant_tokens_mask": True}
    said = tokenizer.apply_chat_template([*_conversation(reading, before), last], **options)
    mask = [bool(value) for value in said["assistant_masks"]]
    length = len(mask) - next((place for place, learnt in enumerate(reversed(mask)) if learnt), len(mask))
    return list(said["input_ids"])[:length], mask[:length]
