"""What the driver asks of a worker in one call: its share of a step, or of several in a row.

A column that only the worker that made it reads stays there by a name, and is dropped with its last reader.
Any other is returned into the object store, or, where others can read it in this worker's memory, lent: it
stays too, and is dropped once its last reader has reported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Here:
    """Stands for a part that stays with the worker that made it."""

    name: str


@dataclass(frozen=True)
class Sent:
    """Stands for the part with this number among those that come along with the tasks."""

    number: int


@dataclass(frozen=True)
class Task:
    """One step's share of a call.

    Args:
        method: of the worker; it returns a ``Report``, behind it a ``Part`` for each column that it makes.
        args: of the method.
        parts: that it is given behind them.
        keeps: for each column that it makes, the name that it stays by, or nothing where it is returned.
        lends: for each column that it returns, the name that it stays by if it is lent, or nothing.
        drops: names of parts that nothing reads after this.
    """

    method: str
    args: tuple[Any, ...]
    parts: tuple[Here | Sent, ...] = ()
    keeps: tuple[str, ...] = ()
    lends: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()

    @property
    def returned(self) -> int:
        """The number of parts that it returns."""
        return len(self.lends)


class Trail:
    """How many tasks a worker has begun, in eight bytes of a file: what one that is gone has done last."""

    def __init__(self, folder: Path, pool: str, device: int) -> None:
        """One in a run's ``logs``, on a disk that the driver and the workers share."""
        self.path = folder / f"{pool}-{device}.task"
        self.count, self.file = 0, -1

    def begin(self) -> None:
        """Begin to count; what an earlier worker counted there is gone."""
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def step(self) -> None:
        """Note that a task begins."""
        self.count += 1
        os.pwrite(self.file, self.count.to_bytes(8, "little"), 0)

    def last(self) -> int:
        """The count that was noted last."""
        return int.from_bytes(self.path.read_bytes(), "little") if self.path.is_file() else 0

    def close(self) -> None:
        """Close the file."""
        if self.file >= 0:
            os.close(self.file)
