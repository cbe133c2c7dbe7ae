"""Excerpts: the rows of columns that a worker writes to a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Excerpt:
    """Rows of one column, or of a copy of it, which lie in ``parts`` parts, one after the other.

    ``lines`` are those of the file that they are for, int64 ``[rows]``.
    """

    column: str
    lines: Any
    parts: int
