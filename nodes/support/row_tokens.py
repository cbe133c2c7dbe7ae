"""Rows as token ids, many at a time: a tokenizer then uses all of its threads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rlgraph.nodes.support.chat_template import TemplateError
from rlgraph.nodes.support.conversation import (
    Asked,
    ReadingOptions,
    marked_by_template,
    pieces_of,
    written,
    written_at_once,
)
from rlgraph.nodes.support.row_field import DataError

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
    """Yield the ids of each row and which of them are learnt; an end token is behind the last turn.

    Raises:
        DataError: a row has nothing before what is learnt.
        TemplateError: a chat template can't write one.
    """
    marked, pieces = [], []
    for row in rows:
        with _placed(row.place):
            marked.append(marked_by_template(tokenizer, reading, row))
            pieces.append([] if marked[-1] else pieces_of(tokenizer, reading, row))
    first = iter(encode(tokenizer, reading, [row[0][0] for row in pieces if row]))
    texts = [text for row in pieces for text, _ in row[1:]]
    rest = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    for row, made, parts in zip(rows, marked, pieces, strict=True):
        ids, mask = made or ([], [])
        for number, (_, learnt) in enumerate(parts):
            part = next(rest if number else first)
            ids, mask = [*ids, *part], [*mask, *[learnt] * len(part)]
        if not row.turns or ids[-1:] != [tokenizer.eos_token_id]:
            ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
        if mask[:1] != [False]:
            raise _no_tokens(row)
        yield ids, mask


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
