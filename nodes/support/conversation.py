"""Rows as conversations: what the policy is asked, what it answered, and what of that is learnt.

question     text, or chat messages {role, content, tool_calls, ...}
answer       text, or the messages behind the question; null: the assistant's turn that ends the question

             user ─ assistant ─ tool ─ assistant
last                                   learnt       assistant_turns
all                 learnt             learnt
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlgraph.nodes.support.chat_template import Template, rendered_at_once
from rlgraph.nodes.support.row_field import DataError, given
from rlgraph.nodes.support.row_form import (
    TRAIN,
    Turns,
    answer_text,
    has_messages,
    messages_of,
    refuse_encoded,
    tools_of,
)
from rlgraph.nodes.support.template_reads import for_template, refuse_unread

Messages = list[dict[str, Any]]
Question = str | Messages
TextPiece = tuple[str, bool]  # a text, and whether it is learnt


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
    def required_paths(self) -> list[str]:
        """Return the paths of the fields that every row has to have, ``columns`` aside."""
        paths = [self.question, self.answer, self.other, self.row_tools, *(self.where or ())]
        return [*dict.fromkeys(path for path in paths if path is not None)]


@dataclass(frozen=True)
class Asked:
    """A row as a question and its answer; ``turns`` are both as messages, where the answer is a turn.

    Messages are as ``rlgraph.nodes.support.row_form`` normalises them.
    """

    place: str
    question: Question
    answer: str
    options: Mapping[str, Any] | None  # of the chat template
    turns: Sequence[dict[str, Any]] = ()
    first_turn: int = 0  # the first of the turns that may be learnt
    tools: str = ""  # the row's own, as JSON
    has_marker: bool = False  # whether ``answer_after`` stood in the answer

    @property
    def words(self) -> str:
        """Return the question as text: all messages of a conversation, so that no two are taken for one.

        A row's own tools are part of what is asked.
        """
        if isinstance(self.question, str):
            text = self.question
        elif len(self.question) == 1:
            text = str(self.question[0]["content"])
        else:
            text = "\n\n".join(f"{message['role']}: {_words_of(message)}" for message in self.question)
        if self.tools:
            text += f"\n\ntools: {self.tools}"
        return text


def _words_of(message: Mapping[str, Any]) -> str:
    """Return all that a message says beside its role."""
    content = str(message["content"])
    more = {key: value for key, value in message.items() if key not in ("role", "content", TRAIN)}
    if not more:
        return content
    return f"{content} {json.dumps(more, ensure_ascii=False, default=str)}"


def asked(place: str, row: Mapping[str, Any], reading: ReadingOptions) -> Asked:
    """Return a row as a question and its answer.

    Raises:
        DataError: it lacks one, or one is neither text nor messages.
    """
    options = _options(place, row, reading)
    question, answer = _sides(place, row, reading)
    if isinstance(answer, str):
        result = _asked_in_text(place, question, answer, options, reading)
    else:
        result = _asked_in_turns(place, question, answer, options, reading)
    tools = (options or {}).get("tools")
    if reading.row_tools and tools:
        result = replace(result, tools=json.dumps(tools, ensure_ascii=False))
    if reading.answer_after and reading.answer_after in result.answer:
        answer = _behind_marker(place, result.answer, reading.answer_after, reading)
        result = replace(result, answer=answer, has_marker=True)
    return result


def _asked_in_turns(
    place: str,
    question: Question,
    answer_turns: Messages,
    options: Mapping[str, Any] | None,
    reading: ReadingOptions,
) -> Asked:
    """Return a row whose answer is the last turn of a conversation.

    Raises:
        DataError: the conversation does not end with a turn of the assistant, or has nothing before it.
    """
    if not isinstance(question, list):
        question = [_user_message(question)]
    question, answer_turns = _without_repeated_question(place, question, answer_turns, reading)
    talk = [*question, *answer_turns]
    if talk[-1]["role"] != "assistant":
        if reading.answer is None:
            return Asked(place, question, "", options)
        law = f"{place}: {reading.answer!r} does not end with the assistant's turn"
        raise DataError(f"{law}; correct the row")
    *question_turns, last_turn = talk
    if not question_turns:
        raise DataError(f"{place}: the conversation has nothing before the assistant's turn; add a question")
    if reading.answer is None and _continues(options):
        return Asked(place, talk, "", options)
    answer = answer_text(place, str(reading.answer), last_turn["content"])
    first_turn = len(question) if reading.answer else 0
    return Asked(place, question_turns, answer, options, talk, first_turn)


def _continues(options: Mapping[str, Any] | None) -> bool:
    """Return whether the policy goes on with the last message, in place of a turn of its own."""
    return bool((options or {}).get("continue_final_message"))


def _user_message(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _asked_in_text(
    place: str, question: Question, answer: str, options: Mapping[str, Any] | None, reading: ReadingOptions
) -> Asked:
    """Return a row whose answer is a text, which is not a turn of its question.

    Raises:
        DataError: the question ends with a turn of the assistant's, which is not said to be continued.
    """
    continues = _continues(options)
    ends_with_assistant = isinstance(question, list) and question[-1]["role"] == "assistant"
    if ends_with_assistant and not continues:
        law = f"{place}: {reading.question!r} ends with the assistant's turn, and {reading.answer!r} holds "
        law += "the answer: the policy would be asked behind its own turn"
        remedy = "take the turn out, or set answer: null to take it for the answer, or have the policy "
        remedy += "continue it by template_options: {continue_final_message: true}"
        raise DataError(f"{law}; {remedy}")
    if continues and not ends_with_assistant:
        law = f"{place}: continue_final_message needs a question that ends with the assistant's turn"
        raise DataError(f"{law}; correct the row, or take it out of template_options")
    has_turns = reading.template != "plain" and reading.answer is not None
    if continues or not has_turns:
        return Asked(place, question, answer, options)
    question_turns = question if isinstance(question, list) else [_user_message(question)]
    turns = [*question_turns, {"role": "assistant", "content": answer}]
    return Asked(place, question, answer, options, turns, len(question_turns))


def _sides(place: str, row: Mapping[str, Any], reading: ReadingOptions) -> tuple[Question, Question]:
    """Return what comes before the answer, and the answer; without a column for it, no messages."""
    if reading.question is None:
        return _sides_of_pair(place, row, reading)
    question = _checked(place, reading.question, given(place, row, reading.question), reading)
    if reading.answer is None:
        return question, "" if isinstance(question, str) else []
    answer = given(place, row, reading.answer)
    if not has_messages(answer):
        return question, answer_text(place, reading.answer, answer)
    turns = messages_of(place, reading.answer, answer)
    other_answer = given(place, row, reading.other) if reading.other else None
    if has_messages(other_answer):
        other_turns = messages_of(place, str(reading.other), other_answer)
        _refuse_parted(place, _from_assistant(turns), _from_assistant(other_turns), reading)
    return question, _checked(place, reading.answer, answer, reading)


def _sides_of_pair(place: str, row: Mapping[str, Any], reading: ReadingOptions) -> tuple[Messages, Messages]:
    """Return what both answers of a pair begin with, as the question, and the other messages of the first."""
    answer_path = str(reading.answer)
    answer = given(place, row, answer_path)
    other_answer = given(place, row, str(reading.other))
    turns = _checked(place, answer_path, answer, reading)
    other_turns = _checked(place, answer_path, other_answer, reading)
    if isinstance(turns, str) or isinstance(other_turns, str):
        law = f"{place}: {reading.answer!r} is a text, and so there is no question"
        raise DataError(f"{law}; name its column with question:")
    common = 0
    for turn, other_turn in zip(turns, other_turns, strict=False):
        if turn != other_turn:
            break
        common += 1
    common = min(common, len(turns) - 1)  # sides that are equal have their last turn for an answer
    _refuse_parted(place, turns[common:], other_turns[common:], reading)
    return turns[:common], turns[common:]


def _from_assistant(messages: Messages) -> Messages:
    """Return messages from the first turn of the assistant's on."""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            return messages[number:]
    return []


def _refuse_parted(place: str, turns: Messages, other_turns: Messages, reading: ReadingOptions) -> None:
    """Refuse the sides of a pair that part elsewhere than at a turn of the assistant's that is compared.

    Raises:
        DataError: they answer different questions, or part before the last turn, which alone is compared.
    """
    sides = f"{reading.answer!r} and {reading.other!r}"
    for side in (turns, other_turns):
        if side and side[0]["role"] != "assistant":
            law = f"{place}: {sides} differ before the assistant's turn, so they answer different questions"
            raise DataError(f"{law}; correct the row, or remove it")
    if reading.assistant_turns == "last" and turns[:-1] != other_turns[:-1]:
        law = f"{place}: {sides} differ before their last turn, which alone is compared"
        raise DataError(f"{law}; set assistant_turns: all, or correct the row")


def _without_repeated_question(
    place: str, question: Messages, answer_turns: Messages, reading: ReadingOptions
) -> tuple[Messages, Messages]:
    """Return question and answer with the question once, where the answer is a whole conversation.

    Raises:
        DataError: the answer begins with another question.
    """
    if not question or not answer_turns or question[-1]["role"] == "assistant":
        return question, answer_turns
    has_system_alone = answer_turns[0]["role"] == "system" and question[0]["role"] != "system"
    system_turns = 1 if has_system_alone else 0
    compared = answer_turns[system_turns:]
    repeats_question = len(compared) > len(question) and all(map(_same, question, compared))
    if repeats_question:
        length = system_turns + len(question)
        return answer_turns[:length], answer_turns[length:]
    if compared and compared[0]["role"] in ("user", "system"):
        law = f"{place}: {reading.answer!r} begins with a question of its own, which is not that of "
        law += f"{reading.question!r}"
        raise DataError(f"{law}; set question: null where the answers hold it, or correct the row")
    return question, answer_turns


def _same(message: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether two messages say the same, white space at both ends aside."""
    if message["role"] != expected["role"]:
        return False
    return bool(message["content"].strip() == expected["content"].strip())


def _checked(place: str, path: str, value: Any, reading: ReadingOptions) -> Question:
    """Return a question or an answer as text, or as normalised messages."""
    if not isinstance(value, str):
        if reading.template == "plain" and has_messages(value):
            raise DataError(f"{place}: {path!r} holds chat messages; set template: chat")
        return messages_of(place, path, value)
    if reading.template == "chat":
        refuse_encoded(place, path, value)
        is_blank = not value.strip()
        if is_blank and path == reading.question:
            law = f"{place}: {path!r} is blank, so nothing is asked"
            raise DataError(f"{law}; fill it in, or remove the row")
    return value


def _behind_marker(place: str, answer: str, marker: str, reading: ReadingOptions) -> str:
    """Return what follows the last marker in an answer.

    Raises:
        DataError: nothing follows it.
    """
    words_behind = answer.rpartition(marker)[2].strip()
    if not words_behind:
        law = f"{place}: nothing stands behind {marker!r} in {reading.answer!r}"
        raise DataError(f"{law}; fill it in, or remove the row")
    return words_behind


def _options(place: str, row: Mapping[str, Any], reading: ReadingOptions) -> Mapping[str, Any] | None:
    """Return the options of the chat template, among the tools of which are those of the row alone."""
    if reading.row_tools is None:
        return reading.template_options
    options = reading.template_options or {}
    known = {tool["function"]["name"]: tool for tool in options.get("tools", ())}
    tools = []
    for tool in tools_of(place, reading.row_tools, given(place, row, reading.row_tools)):
        if not isinstance(tool, str):
            tools.append(tool)
        elif tool in known:
            tools.append(known[tool])
        else:
            law = f"{place}: {reading.row_tools!r} names {tool!r}, which is none of tools: {', '.join(known)}"
            raise DataError(f"{law}; correct the row, or offer it")
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
    talks = [for_template(tokenizer, conversation(reading, each), options) for each in questions]
    for talk in talks:
        refuse_unread(tokenizer, talk, options)
    return rendered_at_once(tokenizer, talks, options, begun=not options.get("continue_final_message"))


def conversation(reading: ReadingOptions, question: Question) -> Messages:
    """Return chat messages; ``system`` and ``suffix`` are added to a given conversation too, where set.

    The suffix stands behind the last message of the user.
    """
    messages = [_user_message(question)] if isinstance(question, str) else [*question]
    has_system = messages[0]["role"] in ("system", "developer")
    if reading.system is not None and not has_system:
        messages.insert(0, {"role": "system", "content": reading.system})
    if not reading.suffix:
        return messages
    for number in reversed(range(len(messages))):
        message = messages[number]
        if message["role"] == "user":
            messages[number] = {**message, "content": message["content"] + reading.suffix}
            break
    return messages
