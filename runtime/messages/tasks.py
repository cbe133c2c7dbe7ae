"""Tasks that the driver sends to a worker in one call: its share of a step, or of several in a row.

A column that only the worker that made it reads stays there by a name, and is dropped with its last reader.
Any other is returned into the object store, or, where all workers are of one host, a reference to memory that
they share: that is dropped once the column's last reader has reported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Place = tuple[str, int]  # a pool, and a device's number in it
WORKER, HOST, STORE = "worker", "host", "store"  # a column that a task makes goes to one of these


def place_text(place: Place) -> str:
    """Return a worker's place as plans write it: ``gen[1]``."""
    return f"{place[0]}[{place[1]}]"


@dataclass(frozen=True)
class Segment:
    """A named segment of memory that the processes of a host share, with an array of a numpy dtype.

    ``offsets``, int64 ``[rows + 1]``, say where each row begins.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: Any


@dataclass(frozen=True)
class ColumnRef:
    """A worker's rows of a column: what the driver passes on in place of what they hold.

    Attributes:
        name: of the column and of its iteration.
        location: ``WORKER`` where the worker that made them keeps them for itself; a ``Segment`` of its host;
            or the object store's reference, and in a task the number of the argument that brings them. Of a
            column that a task will make it is where that goes; of ``HOST`` only long ones do.
    """

    name: str
    location: Any = WORKER


@dataclass(frozen=True)
class Task:
    """One step's share of a call.

    Args:
        method: of the worker; it returns a ``Report``, behind it a ``Chunk`` for each column that it makes.
        args: of the method.
        inputs: the columns that follow them: kept by this worker, or brought by an argument of that number.
        outputs: the columns that it makes, and where they go.
        drops: names of columns that nothing reads after this.
    """

    method: str
    args: tuple[Any, ...]
    inputs: tuple[ColumnRef, ...] = ()
    outputs: tuple[ColumnRef, ...] = ()
    drops: tuple[str, ...] = ()

    @property
    def returned(self) -> int:
        """Return the number of columns that it returns."""
        return sum(ref.location != WORKER for ref in self.outputs)


@dataclass(frozen=True)
class Excerpt:
    """Rows of a column, or of a copy of it, that a worker writes to a file; ``chunk_count`` chunks hold them.

    ``lines`` are those of the file that they are for, int64 ``[rows]``.
    """

    column: str
    lines: Any
    chunk_count: int


class TaskCounter:
    """A task counter in an 8-byte file, so that the driver can tell which task a crashed worker was in."""

    def __init__(self, folder: Path, pool: str, device: int) -> None:
        """Open a worker's counter in a run's ``logs``, on a disk that driver and workers share."""
        self.path = folder / f"{pool}-{device}.task"
        self.count = 0
        self.file = -1

    def begin(self) -> None:
        """Begin to count; the count of an earlier worker is gone."""
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def step(self) -> None:
        """Note that a task begins."""
        self.count += 1
        os.pwrite(self.file, self.count.to_bytes(8, "little"), 0)

    def last(self) -> int:
        """Return the count that was noted last."""
        return int.from_bytes(self.path.read_bytes(), "little") if self.path.is_file() else 0

    def close(self) -> None:
        """Close the file."""
        if self.file >= 0:
            os.close(self.file)
