"""What a samples file holds: the first rows of an iteration, whichever devices they lie on.

    {"tokens": "12+34=46", "responses": "46", "rewards": 1.0,
     "pieces": ["1", "2", "+", ...], "loss_mask": [false, ...], "old_logprobs": [0.0, ...], ...}

A row that a filter dropped has null where others have what was computed for the rows that stay.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlgraph.plan import Plan
from rlgraph.runtime.columns import Part, concat, take, unpack

if TYPE_CHECKING:
    from rlgraph.runtime.cluster import Place
    from rlgraph.runtime.walk import Walk

ROWS = 32  # of a samples file
TOKENS = 2**14  # of those rows that come with what is known of each token
DIGITS = 4
WHOLE = ("text[samples]", "float32[samples]")
EACH = ("float32[samples, tokens]", "boolean[samples, tokens]", "int64[samples, tokens]")


@dataclass(frozen=True)
class Excerpt:
    """Rows of one column, which lie in ``parts`` parts, one after the other.

    ``lines`` are those of the file that they are for, int64 ``[rows]``.
    """

    column: str
    lines: Any
    parts: int

    @property
    def label(self) -> str:
        return label(self.column)


def label(column: str) -> str:
    """What a column is called where it lies and for which rows does not matter.

    Example:
        >>> label("answer*samples"), label("tokens/informative"), label("values@one")
        ('answer', 'tokens', 'values')
    """
    return re.split(r"[*/@]", column)[0]


def sample_columns(plan: Plan, phase: str) -> list[str]:
    """Columns that tell what the model wrote and what was computed of it; none where no model writes."""
    columns = plan.columns[phase]
    if "responses" not in columns:
        return []
    rows = columns["responses"].domain
    return [
        name
        for name, column in columns.items()
        if "@" not in name
        and column.type in (*WHOLE, *EACH)
        and (column.domain == rows or column.domain.startswith(f"{rows}/"))
    ]


@dataclass(frozen=True)
class Source:
    """Where some rows of a column are: a worker, its part of the column, and which rows of that."""

    place: Place
    part: Any  # a reference
    rows: Any


def excerpts(walk: Walk) -> list[tuple[Excerpt, list[Source]]]:
    """The first rows of each of the columns, and where they are; tokens first.

    Of several columns of one name, that of the most rows is taken.
    """
    held = [name for name in sample_columns(walk.plan, walk.phase) if walk.refs.get(name)]
    base = next((walk.columns[name].domain for name in held if label(name) == "tokens"), None)
    if base is None:
        return []
    found: dict[str, tuple[Excerpt, list[Source]]] = {}
    for name in held:
        domain = walk.columns[name].domain
        if label(name) not in found and (domain == base or domain.startswith(f"{base}/")):
            found[label(name)] = _excerpt(walk, name, base)
    return [found.pop("tokens"), *found.values()]


def _excerpt(walk: Walk, name: str, base: str) -> tuple[Excerpt, list[Source]]:
    column, pool, lines, sources = walk.columns[name], walk.pools[name], [], list[Source]()
    origin = _origin(walk, column.domain, base)
    for device, held in enumerate(walk.rows.layout(column.domain, column.layout, pool)):
        wanted = np.flatnonzero(origin[held] < ROWS)
        if len(wanted) or not sources:  # a part at least, of no rows
            lines.append(origin[held][wanted])
            sources.append(Source((pool, device), walk.refs[name][device], wanted))
    return Excerpt(name, np.concatenate(lines), len(sources)), sources


def _origin(walk: Walk, domain: str, base: str) -> Any:
    """int64 ``[rows]``: the row of ``base`` that each row of a domain is, which filters made of it."""
    if domain == base:
        return np.arange(walk.rows.count(base))
    above = domain.rpartition("/")[0]
    return _origin(walk, above, base)[walk.rows.origin(domain)]


def write_samples(path: str, tokenizer: Any, columns: Sequence[Excerpt], parts: Sequence[Part]) -> None:
    """Write a file of JSON lines.

    Args:
        path: of the file.
        tokenizer: that says what a token id is.
        columns: the token ids first.
        parts: those of the first column, then those of the second.
    """
    values, at = [], 0
    for column in columns:
        values.append(take(concat(parts[at : at + column.parts]), np.argsort(column.lines)))
        at += column.parts
    lines = _lines(tokenizer, columns, values)
    aside = Path(f"{path}.writing")
    text = "".join(json.dumps(line, ensure_ascii=False, default=float) + "\n" for line in lines)
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)  # a worker that is killed here leaves no half of it


def _lines(tokenizer: Any, columns: Sequence[Excerpt], values: Sequence[Part]) -> list[dict[str, Any]]:
    ids = unpack(values[0], "cpu").tolist()
    lines = [{"tokens": tokenizer.decode(row)} for row in ids]
    room = np.cumsum([len(row) for row in ids]) <= TOKENS
    room[:1] = True
    for column, part in [*zip(columns, values, strict=True)][1:]:
        if part.offsets is None:
            _put(lines, column, part.values)
    spelled = {token: tokenizer.decode([token]) for row in ids for token in row}
    for line, row, fits in zip(lines, ids, room, strict=True):
        line.update({"pieces": [spelled[token] for token in row]} if fits else {})
    for column, part in [*zip(columns, values, strict=True)][1:]:
        if part.offsets is not None:
            _put([line for line, fits in zip(lines, room, strict=True) if fits], column, _rounded(part))
    return lines


def _put(lines: Sequence[dict[str, Any]], column: Excerpt, values: Any) -> None:
    """Each row's value on its line, null on a line that has none."""
    for line in lines:
        line[column.label] = None
    for number, value in zip(sorted(column.lines), values, strict=True):
        if number < len(lines):
            lines[number][column.label] = value


def _rounded(part: Part) -> Iterator[list[Any]]:
    """Each row as a list; JSON has no number that is not finite."""
    for row in unpack(part, "cpu").tolist():
        yield [_short(value) if isinstance(value, float) else value for value in row]


def _short(value: float) -> float | None:
    return round(value, DIGITS) if math.isfinite(value) else None
