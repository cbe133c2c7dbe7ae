"""A worker's rows of a column, by where they lie: what the driver passes on in place of what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WORKER, HOST, STORE = "worker", "host", "store"  # where a column that a task makes goes


@dataclass(frozen=True)
class Segment:
    """Values in memory that the processes of a host share.

    Attributes:
        name: of the segment.
        dtype: of the values, as numpy writes it.
        count: of them.
        offsets: int64 ``[rows + 1]``, where each row begins.
    """

    name: str
    dtype: str
    count: int
    offsets: Any


@dataclass(frozen=True)
class ColumnRef:
    """A worker's rows of a column.

    Attributes:
        name: of the column and of its iteration.
        location: ``WORKER`` where the worker that made them keeps them for itself; a ``Segment`` of its host;
            or the object store's reference, and in a task the number of the argument that brings them. Of a
            column that a task will make it is where that goes; of ``HOST`` only long ones do.
    """

    name: str
    location: Any = WORKER
