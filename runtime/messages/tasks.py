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

from rlgraph.runtime.messages.column_ref import WORKER, ColumnRef


@dataclass(frozen=True)
class Task:
    """One step's share of a call.

    Args:
        method: of the worker; it returns a ``Report``, behind it a ``Part`` for each column that it makes.
        args: of the method.
        parts: that it is given behind them: kept by this worker, or brought by an argument of that number.
        makes: the columns that it makes, and where they go.
        drops: names of parts that nothing reads after this.
    """

    method: str
    args: tuple[Any, ...]
    parts: tuple[ColumnRef, ...] = ()
    makes: tuple[ColumnRef, ...] = ()
    drops: tuple[str, ...] = ()

    @property
    def returned(self) -> int:
        """The number of parts that it returns."""
        return sum(ref.location != WORKER for ref in self.makes)


class Trail:
    """A task counter in an 8-byte file, so that the driver can tell which task a crashed worker was in."""

    def __init__(self, folder: Path, pool: str, device: int) -> None:
        """Open a worker's counter in a run's ``logs``, on a disk that driver and workers share."""
        self.path = folder / f"{pool}-{device}.task"
        self.count, self.file = 0, -1

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
