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

SAYING = ("tool_calls", WRITTEN_CALLS, *THOUGHTS)  # what a turn without content may say
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
        with _placed(row.place):
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
    text_pieces = _pieces(tokenizer, reading, rows)
    examples = _tokenised(tokenizer, reading, [token_parts for token_parts, _ in text_pieces])
    for row, (ids, mask), (_, closing) in zip(rows, examples, text_pieces, strict=True):
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
    texts = ["".join(text for text, _ in token_parts) for token_parts in rows]
    options = {"add_special_tokens": False, "return_attention_mask": False}
    encodings = tokenizer(texts, **options).encodings if texts else []
    examples: list[Example | None] = []
    for token_parts, encoding in zip(rows, encodings, strict=True):
        examples.append(_cut_tokens(tokenizer, token_parts, encoding))
    across = [number for number, example in enumerate(examples) if example is None]
    retokenised = iter(_tokenised_apart(tokenizer, reading, [rows[number] for number in across]))
    return [next(retokenised) if example is None else example for example in examples]


def _cut_tokens(tokenizer: Any, token_parts: Sequence[TextPiece], encoding: Any) -> Example | None:
    """Return the ids of a whole text with its pieces' marks, or nothing if a token is of two pieces."""
    ids = encoding.ids
    mask: list[bool] = []
    text = "".join(text for text, _ in token_parts)
    end = 0
    for text_piece, learnt in token_parts:
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
        return int(token_before) + 1  # white space behind it that it takes in is no token
    token_behind = encoding.char_to_token(place)
    if token_behind is None or encoding.token_to_chars(token_behind)[0] != place:
        return None
    if text[place - 1] == " " and text[place] != " ":
        return None  # some tokenizers give a word's place without the space that its token begins with
    return int(token_behind)


def _tokenised_apart(
    tokenizer: Any, reading: ReadingOptions, rows: Sequence[list[TextPiece]]
) -> list[Example]:
    """Return the ids of rows with each piece tokenised for itself."""
    first_ids = iter(encode(tokenizer, reading, [token_parts[0][0] for token_parts in rows]))
    texts = [text for token_parts in rows for text, _ in token_parts[1:]]
    other_ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    examples = []
    for token_parts in rows:
        ids: list[int] = []
        mask: list[bool] = []
        for number, (_, learnt) in enumerate(token_parts):
            piece_ids = next(other_ids if number else first_ids)
            ids = [*ids, *piece_ids]
            mask = [*mask, *[learnt] * len(piece_ids)]
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
    has_content = bool(row.answer.strip())
    if row.turns and any(key in row.turns[-1] for key in SAYING):
        has_content = True
    if not has_content:
        law = f"{row.place}: the answer is empty, so that only the end would be learnt"
        raise DataError(f"{law}; fill it in, or remove the row")
    if not row.turns:
        return
    places = learnt_places(reading, row.turns, row.first)
    if not places:
        law = f"{row.place}: weight or train of its messages says that no turn is learnt"
        raise DataError(f"{law}; remove the row, or set assistant_turns: all where another turn is")
    for place in places:
        turn = row.turns[place]
        if not turn["content"].strip() and not any(key in turn for key in SAYING):
            law = f"{row.place}: turn {place + 1} is empty, so that only its end would be learnt"
            raise DataError(f"{law}; fill it in, or leave it out by weight: 0 of the message")


def learnt_places(reading: ReadingOptions, talk: Sequence[Mapping[str, Any]], first_turn: int) -> list[int]:
    """Return which turns of a conversation are learnt."""
    places = [place for place in range(first_turn, len(talk)) if talk[place]["role"] == "assistant"]
    chosen = places if reading.assistant_turns == "all" else places[-1:]
    return [place for place in chosen if talk[place].get(TRAIN, True)]


def _pieces(
    tokenizer: Any, reading: ReadingOptions, rows: Sequence[Asked]
) -> list[tuple[list[TextPiece], int | None]]:
    """Return rows as texts, each learnt or not and tokenised for itself as in a rollout.

    Beside each stands the id of the end token that is learnt behind it, where its texts don't have it.
    """
    if reading.template == "plain":
        questions = [written(tokenizer, reading, row.question, row.options) for row in rows]
        return [
            ([(question, False), (row.answer, True)], tokenizer.eos_token_id)
            for question, row in zip(questions, rows, strict=True)
        ]
    talks = []
    for row in rows:
        with _placed(row.place):
            talks.append(_talk(tokenizer, reading, row))
    plain = [talk for talk in talks if not talk.marked]
    asked_for = [Rendering(talk.place, talk.messages, talk.options, False) for talk in plain]
    for talk in plain:
        for place in talk.learnt:
            asked_for.append(Rendering(talk.place, talk.messages[:place], talk.options, True))
            is_last = place == len(talk.messages) - 1  # else with what follows: where do both part?
            asked_for.append(Rendering(talk.place, talk.messages[: place + 1], talk.options, is_last))
    texts = iter(_rendered_all(tokenizer, asked_for, shared=not reading.row_tools))
    wholes = [next(texts) for _ in plain]
    whole_of = iter(wholes)
    text_pieces: list[tuple[list[TextPiece], int | None]] = []
    for talk in talks:
        with _placed(talk.place):
            closing = None  # marks say all that is learnt
            if talk.marked:
                everything = talk.all_turns
                conversation_text, spans = marked_spans(
                    tokenizer, talk.messages, talk.options, talk.learnt, everything
                )
            else:
                conversation_text, spans = next(whole_of), []
                for place in talk.learnt:
                    begin, ended = next(texts), next(texts)
                    span = turn_span(tokenizer, talk.messages, place, conversation_text, begin, ended)
                    spans.append(with_stop(tokenizer, talk.options, conversation_text, span))
                start, stop = spans[-1]
                calls_tools = "tool_calls" in talk.messages[talk.learnt[-1]]
                closing = closing_id(tokenizer, talk.options, conversation_text[start:stop], calls_tools)
            refuse_unread(tokenizer, talk.messages, talk.options, talk.learnt)
            turn_texts = [conversation_text[start:stop] for start, stop in spans]
            turn_texts = ["".join(turn_texts)] if talk.marked else turn_texts
            refuse_unsaid(tokenizer, talk.messages, talk.options, talk.learnt, turn_texts)
        text_pieces.append((_cut(conversation_text, spans, talk.place), closing))
    return text_pieces


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
    """Messages that a chat template is to write, with the next turn begun or not."""

    place: str
    messages: Messages
    options: Mapping[str, Any] | None
    begun: bool


def _talk(tokenizer: Any, reading: ReadingOptions, row: Asked) -> Talk:
    options = row.options or {}
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise DataError(f"the tokenizer {tokenizer.name_or_path} has no chat template; set template: plain")
    *turns_before, last_turn = row.turns
    given = [*conversation(reading, turns_before), last_turn]
    first_turn = row.first + len(given) - len(row.turns)
    learnt = learnt_places(reading, given, first_turn)
    turns = [place for place, message in enumerate(given) if message["role"] == "assistant"]
    messages = for_template(tokenizer, given, options)
    return Talk(row.place, messages, options, learnt, learnt == turns, is_marked(tokenizer, options))


def _rendered_all(tokenizer: Any, wanted: Sequence[Rendering], shared: bool) -> list[str]:
    """Return what a template writes: with options in common at once, or one by one if that fails."""
    if shared and wanted:
        with suppress(TemplateError):
            texts: dict[int, str] = {}
            for is_open in (False, True):
                places = [place for place, each in enumerate(wanted) if each.begun == is_open]
                written = [wanted[place].messages for place in places]
                if places:
                    rendered_texts = rendered_at_once(tokenizer, written, wanted[0].options, is_open)
                    texts |= dict(zip(places, rendered_texts, strict=True))
            return [texts[place] for place in range(len(wanted))]
    one_by_one = []
    for each in wanted:
        with _placed(each.place):
            if not each.messages:
                _refuse_unbegun(tokenizer, each)
            one_by_one.append(rendered(tokenizer, each.messages, each.options, each.begun))
    return one_by_one


def _refuse_unbegun(tokenizer: Any, begin: Rendering) -> None:
    """Refuse to learn a greeting that comes before any message, where a template can't begin with it.

    Raises:
        TemplateError: it can't.
    """
    try:
        rendered(tokenizer, begin.messages, begin.options, begin.begun)
    except TemplateError as error:
        law = (
            f"the chat template of {tokenizer.name_or_path} can't begin a conversation with turn 1, which is "
        )
        raise TemplateError(f"{law}the assistant's; leave it out by weight: 0 of the message") from error


def _cut(conversation_text: str, spans: Sequence[TextSpan], place: str) -> list[TextPiece]:
    """Return a text up to the last turn that is learnt, in pieces."""
    if not spans:
        raise TemplateError(f"{place}: the chat template marks nothing that is learnt; {REMEDY}")
    text_pieces: list[TextPiece] = []
    end = 0
    for start, stop in spans:
        text_pieces += [(conversation_text[end:start], False), (conversation_text[start:stop], True)]
        end = stop
    return text_pieces


@contextmanager
def _placed(place: str) -> Iterator[None]:
    """Name the row in what is said of a chat template."""
    try:
        yield
    except TemplateError as error:
        raise TemplateError(f"{place}: {error}") from error


def encode(tokenizer: Any, reading: ReadingOptions, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts as they are written; a chat template writes special tokens itself."""
    special = reading.template == "plain"
    options = {"add_special_tokens": special, "return_attention_mask": False}
    return list(tokenizer(list(texts), **options)["input_ids"]) if texts else []
