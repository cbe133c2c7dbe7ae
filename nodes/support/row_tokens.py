"""Rows as token ids, many at a time: a tokenizer then uses all of its threads."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rlgraph.nodes.support.chat_template import REMEDY, TemplateError, rendered, rendered_at_once
from rlgraph.nodes.support.conversation import (
    Asked,
    Messages,
    ReadingOptions,
    TextPiece,
    conversation,
    written,
    written_at_once,
)
from rlgraph.nodes.support.row_field import DataError
from rlgraph.nodes.support.row_form import TRAIN, WRITTEN_CALLS
from rlgraph.nodes.support.template_reads import for_template, refuse_unread
from rlgraph.nodes.support.turn_text import (
    THOUGHTS,
    TextSpan,
    added_ids,
    closing_id,
    is_marked,
    marked_spans,
    refuse_unsaid,
    turn_span,
    with_stop,
)

MORE_THAN_CONTENT = ("tool_calls", WRITTEN_CALLS, *THOUGHTS)  # what a turn without content may have
Example = tuple[list[int], list[bool]]  # token ids; which of them are learnt


def prompt_ids(tokenizer: Any, reading: ReadingOptions, rows: Sequence[Asked]) -> list[list[int]]:
    """Return the ids of each row's question.

    Raises:
        DataError: it has none.
        TemplateError: a chat template can't write it.
    """
    prompts = encode(tokenizer, reading, _texts(tokenizer, reading, rows))
    for row, ids in zip(rows, prompts, strict=True):
        if not ids:
            raise _no_tokens(row)
    return prompts


def _texts(tokenizer: Any, reading: ReadingOptions, rows: Sequence[Asked]) -> list[str]:
    """Return each row's question as the text of a prompt: all at once, or one by one if that fails."""
    if reading.template == "chat" and rows and not reading.row_tools:
        with suppress(TemplateError):
            return written_at_once(tokenizer, reading, [row.question for row in rows])
    texts = []
    for row in rows:
        with _with_place_in_errors(row.place):
            texts.append(written(tokenizer, reading, row.question, row.options))
    return texts


def _no_tokens(row: Asked) -> DataError:
    return DataError(f"{row.place}: the question has no tokens; remove the row or give it a question")


def examples_of(tokenizer: Any, reading: ReadingOptions, rows: Sequence[Asked]) -> Iterator[Example]:
    """Yield the ids of each row and which of them are learnt, the end of the last turn included.

    Raises:
        DataError: a row has nothing to learn, or nothing before it.
        TemplateError: a chat template can't write one, or not so that a rollout could have said it.
    """
    for row in rows:
        _refuse_nothing(reading, row)
    rows_in_pieces = _rows_in_pieces(tokenizer, reading, rows)
    examples = _tokenised(tokenizer, reading, [text_pieces for text_pieces, _ in rows_in_pieces])
    for row, (ids, mask), (_, closing) in zip(rows, examples, rows_in_pieces, strict=True):
        if closing is not None:
            ids = [*ids, closing]
            mask = [*mask, True]
        if mask[:1] != [False]:
            raise _no_tokens(row)
        yield ids, mask


def _tokenised(tokenizer: Any, reading: ReadingOptions, rows: Sequence[list[TextPiece]]) -> list[Example]:
    """Return the ids of rows in pieces: of the whole text, where its tokens end where the pieces do.

    A tokenizer may write the begin of a text, or what stands behind a control token, otherwise than the same
    characters within a text (Metaspace's prefix of Llama 2 and Mistral; white space that Phi 3's control
    tokens take in). Where a token goes across the border of a turn, no rollout could have sampled it: each
    piece is then tokenised for itself.
    """
    if reading.template == "plain" or not tokenizer.is_fast:
        return _tokenised_apart(tokenizer, reading, rows)
    texts = ["".join(text for text, _ in text_pieces) for text_pieces in rows]
    options = {"add_special_tokens": False, "return_attention_mask": False}
    encodings = tokenizer(texts, **options).encodings if texts else []
    examples: dict[int, Example] = {}
    uncut = []  # rows with a token across a border
    for number, text_pieces in enumerate(rows):
        example = _cut_tokens(tokenizer, text_pieces, encodings[number])
        if example is None:
            uncut.append(number)
        else:
            examples[number] = example
    retokenised = _tokenised_apart(tokenizer, reading, [rows[number] for number in uncut])
    examples |= zip(uncut, retokenised, strict=True)
    return [examples[number] for number in range(len(rows))]


def _cut_tokens(tokenizer: Any, text_pieces: Sequence[TextPiece], encoding: Any) -> Example | None:
    """Return the ids of a whole text with its pieces' marks, or nothing if a token is of two pieces."""
    ids = encoding.ids
    mask: list[bool] = []
    text = "".join(text for text, _ in text_pieces)
    end = 0
    for text_piece, learnt in text_pieces:
        end += len(text_piece)
        border = _border(tokenizer, text, end, encoding)
        if border is None or border < len(mask):
            return None
        mask += [learnt] * (border - len(mask))
    return ids, mask


def _border(tokenizer: Any, text: str, place: int, encoding: Any) -> int | None:
    """Return the number of the token that begins at a place of a text; nothing if none does."""
    if place == len(text):
        return len(encoding.ids)
    if place == 0:
        return 0
    token_before = encoding.char_to_token(place - 1)
    if token_before is not None and encoding.ids[token_before] in added_ids(tokenizer):
        return int(token_before) + 1  # white space that it takes in is not a token of its own
    token_behind = encoding.char_to_token(place)
    if token_behind is None:
        return None
    token_start, _ = encoding.token_to_chars(token_behind)
    if token_start != place:
        return None
    # some tokenizers give a word's place without the space that its token begins with
    is_within_word = text[place - 1] == " " and text[place] != " "
    return None if is_within_word else int(token_behind)


def _tokenised_apart(
    tokenizer: Any, reading: ReadingOptions, rows: Sequence[list[TextPiece]]
) -> list[Example]:
    """Return the ids of rows with each piece tokenised for itself."""
    first_texts = []
    other_texts = []
    for text_pieces in rows:
        texts = [text for text, _ in text_pieces]
        first_texts.append(texts[0])
        other_texts += texts[1:]
    first_ids = iter(encode(tokenizer, reading, first_texts))
    other_ids: Iterator[list[int]] = iter([])
    if other_texts:  # all at once, as a tokenizer then uses its threads
        other_ids = iter(tokenizer(other_texts, add_special_tokens=False)["input_ids"])
    examples = []
    for text_pieces in rows:
        ids: list[int] = []
        mask: list[bool] = []
        for number, (_, is_learnt) in enumerate(text_pieces):
            piece_ids = next(other_ids if number else first_ids)
            ids += piece_ids
            mask += [is_learnt] * len(piece_ids)
        examples.append((ids, mask))
    return examples


def _refuse_nothing(reading: ReadingOptions, row: Asked) -> None:
    """Refuse a row with nothing to imitate: its end token alone would be learnt.

    Raises:
        DataError: the row is such.
    """
    if (row.options or {}).get("continue_final_message"):
        law = f"{row.place}: continue_final_message is of prompts; what is learnt ends its turns"
        raise DataError(f"{law}: take it out of template_options")
    if reading.answer is None and not row.turns:
        law = f"{row.place}: {reading.question!r} does not end with a turn of the assistant, so there is "
        law += "nothing to learn"
        raise DataError(f"{law}; name the column with the answer, correct the row or remove it")
    last_turn = row.turns[-1] if row.turns else {}
    if not row.answer.strip() and not _says_more(last_turn):
        law = f"{row.place}: the answer is empty, so that only the end would be learnt"
        raise DataError(f"{law}; fill it in, or remove the row")
    if not row.turns:
        return
    places = learnt_places(reading, row.turns, row.first_turn)
    if not places:
        law = f"{row.place}: weight or train of its messages says that no turn is learnt"
        raise DataError(f"{law}; remove the row, or set assistant_turns: all where another turn is")
    for place in places:
        turn = row.turns[place]
        if not turn["content"].strip() and not _says_more(turn):
            law = f"{row.place}: turn {place + 1} is empty, so that only its end would be learnt"
            raise DataError(f"{law}; fill it in, or leave it out by weight: 0 of the message")


def _says_more(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn has thoughts or calls, so that it may lack content."""
    return any(key in turn for key in MORE_THAN_CONTENT)


def learnt_places(reading: ReadingOptions, talk: Sequence[Mapping[str, Any]], first_turn: int) -> list[int]:
    """Return which turns of a conversation are learnt."""
    places = [place for place in range(first_turn, len(talk)) if talk[place]["role"] == "assistant"]
    if reading.assistant_turns == "last":
        places = places[-1:]
    return [place for place in places if talk[place].get(TRAIN, True)]


@dataclass(frozen=True)
class Talk:
    """A row's conversation as the chat template is given it, and which of its turns are learnt."""

    place: str
    messages: Messages
    options: Mapping[str, Any] | None
    learnt: list[int]
    all_turns: bool  # whether these are all of the assistant's
    marked: bool


@dataclass(frozen=True)
class Rendering:
    """Messages that a chat template is to write, with the next turn opened or not."""

    place: str
    messages: Messages
    options: Mapping[str, Any] | None
    opens_next_turn: bool


def _rows_in_pieces(
    tokenizer: Any, reading: ReadingOptions, rows: Sequence[Asked]
) -> list[tuple[list[TextPiece], int | None]]:
    """Return rows as texts, each learnt or not and tokenised for itself as in a rollout.

    Beside each stands the id of the end token that is learnt behind it, where its texts don't have it.
    """
    rows_in_pieces: list[tuple[list[TextPiece], int | None]] = []
    if reading.template == "plain":
        for row in rows:
            question = written(tokenizer, reading, row.question, row.options)
            text_pieces = [(question, False), (row.answer, True)]
            rows_in_pieces.append((text_pieces, tokenizer.eos_token_id))
        return rows_in_pieces
    talks = []
    for row in rows:
        with _with_place_in_errors(row.place):
            talks.append(_talk(tokenizer, reading, row))
    # all that templates have to write, in the order in which it is read below
    renderings = []
    for talk in talks:
        if not talk.marked:
            renderings += _renderings(talk)
    texts = iter(_rendered_all(tokenizer, renderings, shared=not reading.row_tools))
    for talk in talks:
        with _with_place_in_errors(talk.place):
            if talk.marked:
                row_in_pieces = _marked_pieces(tokenizer, talk)
            else:
                row_in_pieces = _unmarked_pieces(tokenizer, talk, texts)
        rows_in_pieces.append(row_in_pieces)
    return rows_in_pieces


def _renderings(talk: Talk) -> list[Rendering]:
    """Return what a template is to write of a conversation, for ``_unmarked_pieces`` to tell its turns."""
    renderings = [Rendering(talk.place, talk.messages, talk.options, False)]
    for place in talk.learnt:
        renderings.append(Rendering(talk.place, talk.messages[:place], talk.options, True))
        # the last turn with what follows: where both part, it ends
        is_last = place == len(talk.messages) - 1
        renderings.append(Rendering(talk.place, talk.messages[: place + 1], talk.options, is_last))
    return renderings


def _marked_pieces(tokenizer: Any, talk: Talk) -> tuple[list[TextPiece], int | None]:
    """Return the pieces of a conversation whose template marks all that is learnt, ends included."""
    conversation_text, spans = marked_spans(
        tokenizer, talk.messages, talk.options, talk.learnt, talk.all_turns
    )
    refuse_unread(tokenizer, talk.messages, talk.options, talk.learnt)
    learnt_text = "".join(conversation_text[start:stop] for start, stop in spans)
    refuse_unsaid(tokenizer, talk.messages, talk.options, talk.learnt, [learnt_text])
    return _cut(conversation_text, spans), None


def _unmarked_pieces(tokenizer: Any, talk: Talk, texts: Iterator[str]) -> tuple[list[TextPiece], int | None]:
    """Return the pieces of a conversation by comparing it with its beginnings; ``texts`` are _renderings'."""
    conversation_text = next(texts)
    spans = []
    for place in talk.learnt:
        begin = next(texts)
        ended = next(texts)
        span = turn_span(tokenizer, talk.messages, place, conversation_text, begin, ended)
        spans.append(with_stop(tokenizer, talk.options, conversation_text, span))
    turn_texts = [conversation_text[start:stop] for start, stop in spans]
    calls_tools = "tool_calls" in talk.messages[talk.learnt[-1]]
    closing = closing_id(tokenizer, talk.options, turn_texts[-1], calls_tools)
    refuse_unread(tokenizer, talk.messages, talk.options, talk.learnt)
    refuse_unsaid(tokenizer, talk.messages, talk.options, talk.learnt, turn_texts)
    return _cut(conversation_text, spans), closing


def _talk(tokenizer: Any, reading: ReadingOptions, row: Asked) -> Talk:
    options = row.options or {}
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise DataError(f"the tokenizer {tokenizer.name_or_path} has no chat template; set template: plain")
    *turns_before, last_turn = row.turns
    messages = [*conversation(reading, turns_before), last_turn]
    added_messages = len(messages) - len(row.turns)  # a system message
    learnt = learnt_places(reading, messages, row.first_turn + added_messages)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return Talk(
        place=row.place,
        messages=for_template(tokenizer, messages, options),
        options=options,
        learnt=learnt,
        all_turns=learnt == turns,
        marked=is_marked(tokenizer, options),
    )


def _rendered_all(tokenizer: Any, renderings: Sequence[Rendering], shared: bool) -> list[str]:
    """Return what a template writes: with options in common at once, or one by one if that fails."""
    if shared and renderings:
        with suppress(TemplateError):
            return _rendered_together(tokenizer, renderings)
    texts = []
    for rendering in renderings:
        with _with_place_in_errors(rendering.place):
            if not rendering.messages:
                _refuse_unbegun(tokenizer, rendering)
            texts.append(
                rendered(tokenizer, rendering.messages, rendering.options, rendering.opens_next_turn)
            )
    return texts


def _rendered_together(tokenizer: Any, renderings: Sequence[Rendering]) -> list[str]:
    """Return what a template writes, those with the next turn opened and those without at once each."""
    texts: dict[int, str] = {}
    for opens_next_turn in (False, True):
        numbers = []
        conversations = []
        for number, rendering in enumerate(renderings):
            if rendering.opens_next_turn == opens_next_turn:
                numbers.append(number)
                conversations.append(rendering.messages)
        if numbers:
            options = renderings[0].options
            rendered_texts = rendered_at_once(tokenizer, conversations, options, opens_next_turn)
            texts |= zip(numbers, rendered_texts, strict=True)
    return [texts[number] for number in range(len(renderings))]


def _refuse_unbegun(tokenizer: Any, rendering: Rendering) -> None:
    """Refuse to learn a greeting that comes before any message, where a template can't begin with it.

    Raises:
        TemplateError: it can't.
    """
    try:
        rendered(tokenizer, rendering.messages, rendering.options, rendering.opens_next_turn)
    except TemplateError as error:
        law = f"the chat template of {tokenizer.name_or_path} can't begin a conversation with turn 1, which "
        law += "is the assistant's"
        raise TemplateError(f"{law}; leave it out by weight: 0 of the message") from error


def _cut(conversation_text: str, spans: Sequence[TextSpan]) -> list[TextPiece]:
    """Return a text up to the last turn that is learnt, in pieces."""
    if not spans:
        raise TemplateError(f"the chat template marks nothing that is learnt; {REMEDY}")
    text_pieces: list[TextPiece] = []
    end = 0
    for start, stop in spans:
        text_pieces += [(conversation_text[end:start], False), (conversation_text[start:stop], True)]
        end = stop
    return text_pieces


@contextmanager
def _with_place_in_errors(place: str) -> Iterator[None]:
    """Put the place of a row in front of errors of its chat template."""
    try:
        yield
    except TemplateError as error:
        raise TemplateError(f"{place}: {error}") from error


def encode(tokenizer: Any, reading: ReadingOptions, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts as they are written; a chat template writes special tokens itself."""
    special = reading.template == "plain"
    options = {"add_special_tokens": special, "return_attention_mask": False}
    return list(tokenizer(list(texts), **options)["input_ids"]) if texts else []
