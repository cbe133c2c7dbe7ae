"""Write the samples file of an iteration: its first rows, as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.files import write
from rlgraph.nodes.support.chat_template import well_formed
from rlgraph.runtime.columns.part import Part, gathered, unpack
from rlgraph.runtime.messages.tasks import Excerpt

TOKENS = 2**14  # tokens of rows that are written token by token
DIGITS = 4


def write_samples(
    path: str, tokenizer: Any, columns: Sequence[Excerpt], parts: Sequence[Part]
) -> list[dict[str, Any]]:
    """Write a file of JSON lines from the ``parts`` of the first column, the token ids, then of the next.

    Without a tokenizer, of a graph that has no language model, tokens are written as their ids.

    Returns:
        What the lines have that is not per token.
    """
    picks, counts = [np.argsort(column.lines) for column in columns], [column.parts for column in columns]
    lines = _lines(tokenizer, columns, gathered(picks, counts, parts))
    text = "".join(json.dumps(line, ensure_ascii=False, default=float) + "\n" for line in lines)
    write(Path(path), well_formed(text))
    return [{name: v for name, v in line.items() if not isinstance(v, list | dict)} for line in lines]


def _lines(tokenizer: Any, columns: Sequence[Excerpt], values: Sequence[Part]) -> list[dict[str, Any]]:
    ids = unpack(values[0]).tolist()
    text_of = tokenizer.decode if tokenizer else _ids_as_text
    lines = [{"tokens": text_of(row)} for row in ids]
    others = [*zip(columns, values, strict=True)][1:]
    for column, part in others:
        if part.offsets is None:
            _put(lines, column, part.values if isinstance(part.values, list) else part.values.tolist())
    room = np.cumsum([len(row) for row in ids]) <= TOKENS
    room[:1] = True
    is_complete = lines[: room.sum()]  # those that are written token by token
    spelled = {token: text_of([token]) for row in ids for token in row}
    for line, row in zip(is_complete, ids, strict=False):
        line["pieces"] = [spelled[token] for token in row]
    for column, part in others:
        if part.offsets is not None:
            _put(is_complete, column, _rounded(part))
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
    return None if isinstance(value, float | np.floating) and not math.isfinite(value) else value


def _rounded(part: Part) -> Iterator[list[Any]]:
    """Yield each row as a list; JSON has no number that is not finite."""
    for row in unpack(part).tolist():
        yield [_finite(round(value, DIGITS)) if isinstance(value, float) else value for value in row]
