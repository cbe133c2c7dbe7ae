"""Columns in memory that the processes of a host share: their maker writes them there, and others map them.

A segment is used again once nobody reads what it holds, so that its pages are touched once; where an op still
holds what it read, its reader marks the segment (``keep``), and another one takes its place. Segments are
unlinked when their worker closes. Where it was killed, Python's resource tracker does that; where Ray ends
that too, or the driver was killed, ``runtime/cluster/sweeper.py``; where all of them were, the next worker
that starts on the host: a segment is locked while its worker runs.
"""

import fcntl
import mmap
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import resource_tracker
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from rlgraph.runtime.messages.errors import AwayError
from rlgraph.runtime.messages.tasks import Segment

FOLDER = Path("/dev/shm")  # Linux has POSIX shared memory there
PREFIX = "rlgraph"  # what the names of all sessions begin with
LEAST = 1 << 20  # bytes of values from which on they are shared
CORES = len(os.sched_getaffinity(0))
KIND = "shared_memory"  # as the resource tracker calls it, which names a segment with a slash
COPIERS = ThreadPoolExecutor(CORES)  # long columns are copied by these: others may run meanwhile
MAPPED: dict[str, mmap.mmap] = {}  # segments that this process reads, kept while they are there


@dataclass(frozen=True, eq=False)
class OwnSegment:
    """A segment of this worker's: the name of its file, the handle that locks it, and its bytes."""

    name: str
    handle: int
    bytes: Any


class SharedColumns:
    """The segments of one worker, by the names of the columns in them, and those that are free."""

    def __init__(self, session: str) -> None:
        """None yet; their names begin with ``session``. Those of workers that are gone are unlinked."""
        self.session = session
        self.is_full = False  # whether there was no room once
        self.used: dict[str, OwnSegment] = {}  # by column
        self.free: list[OwnSegment] = []
        for path in FOLDER.glob(f"{PREFIX}-*"):
            with suppress(OSError):  # its worker runs, or it is another user's, or has gone
                handle = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(handle)

    def put(self, column: str, values: Any, offsets: Any) -> Segment | None:
        """Copy a column's values to where others read them; None where there is no room."""
        taken = self._taken(values.nbytes)
        if taken is None:
            return None
        self.used[column] = taken
        target = taken.bytes[: values.nbytes].view(values.dtype).reshape(values.shape)
        edges = np.linspace(0, len(values), CORES + 1, dtype=np.int64).tolist()
        spans = [slice(*edge) for edge in pairwise(edges)]
        list(COPIERS.map(lambda span: np.copyto(target[span], values[span]), spans))
        return Segment(taken.name, values.dtype.str, values.shape, offsets)

    def drop(self, column: str) -> None:
        """Free a column's segment: nobody reads the column any more."""
        if column in self.used:
            segment = self.used.pop(column)
            if os.fstat(segment.handle).st_mode & stat.S_IWUSR:
                self.free.append(segment)
            else:
                _unlink(segment)

    def close(self) -> None:
        """Unlink all of them; what is mapped elsewhere stays until it is let go of."""
        for segment in [*self.used.values(), *self.free]:
            _unlink(segment)
        self.used, self.free = {}, []

    def _taken(self, size: int) -> OwnSegment | None:
        """Return the smallest free segment that is large enough, else a new one in place of the largest."""
        self.free.sort(key=lambda one: len(one.bytes))
        fits = [one for one in self.free if len(one.bytes) >= size]
        if fits:
            self.free.remove(fits[0])
            return fits[0]
        if self.free:
            _unlink(self.free.pop())
        return self._new(size + size // 4)  # rows of a later iteration may be longer

    def _new(self, size: int) -> OwnSegment | None:
        try:
            return _created(self.session, size)
        except OSError:
            self.is_full = True
            return None


def read(column: str, segment: Segment) -> Any:
    """Return the values of a segment where they lie, which can't be written there.

    Raises:
        AwayError: the worker that made it is gone.
    """
    if segment.name not in MAPPED:
        for name in [name for name in MAPPED if not (FOLDER / name).exists()]:
            del MAPPED[name]
        try:
            MAPPED[segment.name] = _mapped(segment.name)
        except OSError as error:
            raise AwayError(f"the column {column} can't be read in shared memory: {error}") from error
    return np.ndarray(segment.shape, segment.dtype, MAPPED[segment.name])


def new_session() -> str:
    """Return what the names of a run's segments begin with."""
    return f"{PREFIX}-{token_hex(4)}"


def segments_of(session: str) -> str:
    """Return a pattern of the files of all segments of a session."""
    return str(FOLDER / f"{session}-*")


def keep(name: str) -> None:
    """Have a segment hold for good what it holds: its maker sees that it may not write there any more."""
    (FOLDER / name).chmod(stat.S_IRUSR)


def _created(session: str, size: int) -> OwnSegment:
    """Create a segment and lock it; ``OSError`` where there is no room, and then nothing is left of it."""
    while True:
        name = f"{session}-{token_hex(4)}"
        handle = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        if not os.fstat(handle).st_nlink:  # a worker that starts was between: nobody seemed to have it
            os.close(handle)
            continue
        resource_tracker.register(f"/{name}", KIND)
        try:
            # takes the memory now: a page that is missing later would end the process
            os.posix_fallocate(handle, 0, size)
            return OwnSegment(name, handle, np.frombuffer(mmap.mmap(handle, 0), np.uint8))
        except OSError:
            _unlink(OwnSegment(name, handle, None))
            raise


def _mapped(name: str) -> mmap.mmap:
    """Return the bytes of a segment to read; no handle of it stays open."""
    with open(FOLDER / name, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _unlink(segment: OwnSegment) -> None:
    (FOLDER / segment.name).unlink(missing_ok=True)  # the driver may have been first
    resource_tracker.unregister(f"/{segment.name}", KIND)
    os.close(segment.handle)
