"""Write the samples file of an iteration: its first rows, as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.files import write
from rlgraph.nodes.support.chat_template import well_formed
from rlgraph.runtime.columns.chunk import Chunk, gathered, unpack
from rlgraph.runtime.messages.tasks import Excerpt

MAX_TOKENS = 2**14  # of all rows that are written token by token
DIGITS = 4
MASK = "loss_mask"  # true for tokens that the policy wrote


def write_samples(
    path: str, tokenizer: Any, columns: Sequence[Excerpt], chunks: Sequence[Chunk]
) -> list[dict[str, Any]]:
    """Write a file of JSON lines from the ``chunks`` of the first column, the token ids, then of the next.

    Without a tokenizer, of a graph that has no language model, tokens are written as their ids.

    Returns:
        What the lines have that is not per token, and the texts of ``prompt`` and ``completion``.
    """
    in_order = [np.argsort(column.lines) for column in columns]
    counts = [column.chunk_count for column in columns]
    chunks_in_order = gathered(in_order, counts, chunks)
    lines = _lines(tokenizer, columns, chunks_in_order)
    text = "".join(json.dumps(line, ensure_ascii=False, default=float) + "\n" for line in lines)
    write(Path(path), well_formed(text))
    texts = _prompts_and_completions(tokenizer, columns, chunks_in_order)
    return [text | _summary(line) for line, text in zip(lines, texts, strict=True)]


def _summary(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a line has that is one value."""
    return {name: value for name, value in line.items() if not isinstance(value, list | dict)}


def _prompts_and_completions(
    tokenizer: Any, columns: Sequence[Excerpt], values: Sequence[Chunk]
) -> Iterator[dict[str, str]]:
    """Yield for each row the text before the first token that the policy wrote, and the text from there on.

    The completion holds special tokens and, in a conversation, what tools answered: the text of
    ``responses`` leaves them out, so that it need not occur in the text of the tokens. Without a column
    ``loss_mask`` nothing is known of a row, and its dict is empty.
    """
    text_of = tokenizer.decode if tokenizer else _ids_as_text
    token_ids = unpack(values[0]).tolist()
    mask_of_line: dict[int, list[bool]] = {}
    for column, column_values in zip(columns, values, strict=True):
        if column.column == MASK:
            masks = unpack(column_values).tolist()
            mask_of_line = dict(zip(sorted(column.lines), masks, strict=True))
    for number, row in enumerate(token_ids):
        mask = mask_of_line.get(number)
        if mask is None:
            yield {}
            continue
        first_written = mask.index(True) if True in mask else len(row)
        yield {"prompt": text_of(row[:first_written]), "completion": text_of(row[first_written:])}


def _lines(tokenizer: Any, columns: Sequence[Excerpt], values: Sequence[Chunk]) -> list[dict[str, Any]]:
    """Return a line per row: what is one value per row, then, on the first lines, what is one per token."""
    token_ids = unpack(values[0]).tolist()
    text_of = tokenizer.decode if tokenizer else _ids_as_text
    lines = [{"tokens": text_of(row)} for row in token_ids]
    per_row = []
    per_token = []
    for column, column_values in zip(columns[1:], values[1:], strict=True):
        if column_values.offsets is None:
            per_row.append((column, column_values))
        else:
            per_token.append((column, column_values))

    for column, column_values in per_row:
        items = column_values.values
        _put(lines, column, items if isinstance(items, list) else items.tolist())

    tokens_until_row = np.cumsum([len(row) for row in token_ids])
    spelled_rows = int((tokens_until_row <= MAX_TOKENS).sum())
    spelled_lines = lines[: max(spelled_rows, 1)]  # the first is always written token by token
    spelling: dict[int, str] = {}
    for row in token_ids:
        spelling |= {token: text_of([token]) for token in {*row} - spelling.keys()}
    for line, row in zip(spelled_lines, token_ids, strict=False):
        line["pieces"] = [spelling[token] for token in row]
    for column, column_values in per_token:
        _put(spelled_lines, column, _rounded(column_values))
    return lines


def _ids_as_text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _put(lines: Sequence[dict[str, Any]], column: Excerpt, values: Any) -> None:
    """Write each row's value on its line, null on a line that has none."""
    for line in lines:
        line[column.column] = None
    for number, value in zip(sorted(column.lines), values, strict=True):
        if number < len(lines):
            lines[number][column.column] = _finite(value)


def _finite(value: Any) -> Any:
    """Return a value of JSON, which has no numbers that are not finite."""
    is_number = isinstance(value, float | np.floating)
    return None if is_number and not math.isfinite(value) else value


def _rounded(chunk: Chunk) -> Iterator[list[Any]]:
    """Yield each row as a list of values of JSON."""
    for row in unpack(chunk).tolist():
        values = []
        for value in row:
            if isinstance(value, float):
                values.append(_finite(round(value, DIGITS)))
            else:
                values.append(value)
        yield values
