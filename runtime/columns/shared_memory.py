"""Columns in memory that the processes of a host share: their maker writes them there, and others map them.

A segment is used again once nobody reads what it holds, so that its pages are touched once; where an op still
holds what it read, its reader marks the segment (``keep``), and another one takes its place. Segments are
unlinked when their worker closes. Where it was killed, or its driver was, ``runtime/cluster/sweeper.py`` does
that.
"""

from __future__ import annotations

import mmap
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from rlgraph.runtime.messages.errors import AwayError
from rlgraph.runtime.messages.tasks import Segment

FOLDER = Path("/dev/shm")  # Linux has POSIX shared memory there
LEAST = 1 << 20  # bytes of values from which on they are shared
CORES = len(os.sched_getaffinity(0))
COPIERS = ThreadPoolExecutor(CORES)  # long columns are copied by these: others may run meanwhile
MAPPED: dict[str, mmap.mmap] = {}  # segments that this process reads, kept while they are there


class SharedColumns:
    """The segments of one worker, by the names of the columns in them, and those that are free."""

    def __init__(self, session: str) -> None:
        """None yet; their names begin with ``session``."""
        self.session = session
        self.is_full = False  # whether there was no room once
        self.used: dict[str, tuple[SharedMemory, Any]] = {}  # column -> its segment, and the bytes there
        self.free: list[tuple[SharedMemory, Any]] = []

    def put(self, column: str, values: Any, offsets: Any) -> Segment | None:
        """Copy a column's values to where others read them; None where there is no room."""
        taken = self._taken(values.nbytes)
        if taken is None:
            return None
        self.used[column] = taken
        target = taken[1][: values.nbytes].view(values.dtype)
        edges = np.linspace(0, len(values), CORES + 1, dtype=np.int64).tolist()
        spans = [slice(*edge) for edge in pairwise(edges)]
        list(COPIERS.map(lambda span: np.copyto(target[span], values[span]), spans))
        return Segment(taken[0].name, values.dtype.str, len(values), offsets)

    def drop(self, column: str) -> None:
        """Free a column's segment: nobody reads the column any more."""
        if column in self.used:
            segment, values = self.used.pop(column)
            if (FOLDER / segment.name).stat().st_mode & stat.S_IWUSR:
                self.free.append((segment, values))
            else:
                _unlink(segment)

    def close(self) -> None:
        """Unlink all of them; what is mapped elsewhere stays until it is let go of."""
        for segment, _ in [*self.used.values(), *self.free]:
            _unlink(segment)
        self.used, self.free = {}, []

    def _taken(self, size: int) -> tuple[SharedMemory, Any] | None:
        """Return the smallest free segment that is large enough, else a new one in place of the largest."""
        self.free.sort(key=lambda one: len(one[1]))
        fits = [one for one in self.free if len(one[1]) >= size]
        if fits:
            self.free.remove(fits[0])
            return fits[0]
        if self.free:
            _unlink(self.free.pop()[0])
        return self._new(size + size // 4)  # rows of a later iteration may be longer

    def _new(self, size: int) -> tuple[SharedMemory, Any] | None:
        segment = None
        try:
            segment = SharedMemory(f"{self.session}-{token_hex(4)}", create=True, size=size)
            segment.close()  # mapped anew below: its own mapping ends with it, whoever looks at it
            with open(FOLDER / segment.name, "r+b") as file:
                # takes the memory now: a page that is missing later would end the process
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            self.is_full = True
            if segment:
                _unlink(segment)
            return None
        return segment, np.frombuffer(_mapped(segment.name, mmap.ACCESS_WRITE), np.uint8)


def read(column: str, segment: Segment) -> Any:
    """Return the values of a segment where they lie, which can't be written there.

    Raises:
        AwayError: the worker that made it is gone.
    """
    if segment.name not in MAPPED:
        for name in [name for name in MAPPED if not (FOLDER / name).exists()]:
            del MAPPED[name]
        try:
            MAPPED[segment.name] = _mapped(segment.name, mmap.ACCESS_READ)
        except OSError as error:
            raise AwayError(f"the column {column} can't be read in shared memory: {error}") from error
    return np.frombuffer(MAPPED[segment.name], segment.dtype, segment.count)


def segments_of(session: str) -> str:
    """Return a pattern of the files of all segments of a session."""
    return str(FOLDER / f"{session}-*")


def keep(name: str) -> None:
    """Have a segment hold for good what it holds: its maker sees that it may not write there any more."""
    (FOLDER / name).chmod(stat.S_IRUSR)


def _mapped(name: str, access: int) -> mmap.mmap:
    """Return the bytes of a segment; no handle of it stays open."""
    with open(FOLDER / name, "r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=access)


def _unlink(segment: SharedMemory) -> None:
    segment.close()
    if (FOLDER / segment.name).exists():  # else the driver was first
        segment.unlink()
