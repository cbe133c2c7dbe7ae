"""Selects the rows of a samples file: the first ones of an iteration, whichever devices they lie on.

    {"tokens": "12+34=46", "responses": "46", "rewards": 1.0,
     "pieces": ["1", "2", "+", ...], "loss_mask": [false, ...], "old_logprobs": [0.0, ...], ...}

A row that a filter dropped has null where others have what was computed for the rows that stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlgraph.ir.graph import is_part
from rlgraph.ir.plan import Plan
from rlgraph.runtime.messages.excerpts import Excerpt

if TYPE_CHECKING:
    from rlgraph.runtime.driver.iteration import Walk
    from rlgraph.runtime.messages.place import Place

ROWS = 32  # rows per samples file
WHOLE = ("text[samples]", "float32[samples]")
EACH = ("float32[samples, tokens]", "boolean[samples, tokens]", "int64[samples, tokens]")


def sample_columns(plan: Plan, phase: str) -> list[str]:
    """Return columns that tell what the model wrote and what was computed of it; none if no model writes."""
    columns = plan.columns[phase]
    if "responses" not in columns:
        return []
    rows = columns["responses"].domain
    return [
        name
        for name, column in columns.items()
        if not column.moved
        and column.type in (*WHOLE, *EACH)
        and is_part(plan.domains[phase], column.domain, rows)
    ]


@dataclass(frozen=True)
class RowSource:
    """Some rows of a column on a worker: its part of the column, and which rows of that."""

    place: Place
    part: Any  # a reference
    rows: Any


def excerpts(walk: Walk) -> list[tuple[Excerpt, list[RowSource]]]:
    """Return the first rows of each of the columns, and where they are; tokens first.

    Of several columns of one name, that of the most rows is taken.
    """
    held = [name for name in sample_columns(walk.plan, walk.phase) if walk.refs.get(name)]
    columns = [walk.columns[name] for name in held]
    base = next((column.domain for column in columns if column.origin == "tokens"), None)
    if base is None:
        return []
    found: dict[str, tuple[Excerpt, list[RowSource]]] = {}
    for name, column in zip(held, columns, strict=True):
        if column.origin not in found and is_part(walk.domains, column.domain, base):
            found[column.origin] = _excerpt(walk, name, base)
    return [found.pop("tokens"), *found.values()]


def _excerpt(walk: Walk, name: str, base: str) -> tuple[Excerpt, list[RowSource]]:
    column, pool, lines, sources = walk.columns[name], walk.pools[name], [], list[RowSource]()
    origin = _origin(walk, column.domain, base)
    for device, held in enumerate(walk.rows.layout(column.domain, column.layout, pool)):
        wanted = np.flatnonzero(origin[held] < ROWS)
        if len(wanted) or not sources:  # a part at least, of no rows
            lines.append(origin[held][wanted])
            sources.append(RowSource((pool, device), walk.part(name, device).location, wanted))
    return Excerpt(column.origin, np.concatenate(lines), len(sources)), sources


def _origin(walk: Walk, domain: str, base: str) -> Any:
    """Return int64 ``[rows]``: for each row of a domain, the row of ``base`` from which filters made it."""
    if domain == base:
        return np.arange(walk.rows.count(base))
    return _origin(walk, str(walk.domains[domain].parent), base)[walk.rows.origin(domain)]
