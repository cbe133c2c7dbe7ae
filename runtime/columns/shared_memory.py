"""Columns in shared memory: the worker that made a column writes it, and others on its host map it.

A segment is reused once nobody reads its column, so that its pages are touched only once. If an op keeps
values that it read, its worker seals the segment (``keep``), and another segment takes its place.

Readers map a segment copy-on-write: what an op writes into a column by mistake changes pages of its own
process alone, which the kernel can name (``is_written``), and the process does not die of it.

A worker unlinks its segments when it closes. If it was killed, Python's resource tracker does; if Ray killed
that as well, or the driver was killed, ``runtime/cluster/sweeper.py`` does; if all of them were killed, the
next worker that starts on the host does: a segment is locked while its worker runs.
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
PREFIX = "rlgraph"  # of the names of all sessions
LEAST = 1 << 20  # bytes of values from which on a column is shared
CORES = len(os.sched_getaffinity(0))
PAGE_MAP = Path("/proc/self/pagemap")  # 8 bytes per page of this process (Linux, admin-guide/mm/pagemap)
NAMES_WRITTEN_PAGES = os.access(PAGE_MAP, os.R_OK)
PRESENT, SWAPPED, OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))  # of these 8 bytes
KIND = "shared_memory"  # the resource tracker's name for it; there a segment's name has a slash in front
COPIERS = ThreadPoolExecutor(CORES)  # copy long columns
MAPPED: dict[str, mmap.mmap] = {}  # segments that this process has mapped, until they are unlinked


@dataclass(frozen=True, eq=False)
class OwnSegment:
    """A segment that this worker created: the name of its file, the handle that locks it, and its bytes."""

    name: str
    handle: int
    bytes: Any


class SharedColumns:
    """The segments of one worker.

    Invariants:
        - a segment is in ``used``, under the column in it, or in ``free``, and never in both.
        - no segment in ``free`` is sealed: its owner may write to it.
    """

    def __init__(self, session: str) -> None:
        """Create no segment yet, and unlink those of workers that are gone.

        The names of segments begin with ``session``.
        """
        self.session = session
        self.is_full = False  # whether there has been no room for a column
        self.used: dict[str, OwnSegment] = {}  # by column
        self.free: list[OwnSegment] = []
        for path in FOLDER.glob(f"{PREFIX}-*"):
            with suppress(OSError):  # its worker runs, it is another user's, or it was unlinked meanwhile
                handle = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(handle)

    def put(self, column: str, values: Any, offsets: Any) -> Segment | None:
        """Copy a column's values to a segment; None if there is no room."""
        segment = self._allocate(values.nbytes)
        if segment is None:
            return None
        self.used[column] = segment
        target = segment.bytes[: values.nbytes].view(values.dtype).reshape(values.shape)
        bounds = np.linspace(0, len(values), CORES + 1, dtype=np.int64).tolist()
        spans = [slice(start, end) for start, end in pairwise(bounds)]
        list(COPIERS.map(lambda span: np.copyto(target[span], values[span]), spans))
        return Segment(segment.name, values.dtype.str, values.shape, offsets)

    def drop(self, column: str) -> None:
        """Free a column's segment: nobody reads the column any more."""
        if column in self.used:
            segment = self.used.pop(column)
            if os.fstat(segment.handle).st_mode & stat.S_IWUSR:
                self.free.append(segment)
            else:
                _unlink(segment)

    def close(self) -> None:
        """Unlink all segments; the memory stays for processes that have mapped it until they unmap it."""
        for segment in [*self.used.values(), *self.free]:
            _unlink(segment)
        self.used = {}
        self.free = []

    def _allocate(self, size: int) -> OwnSegment | None:
        """Return the smallest free segment that is large enough, else a new one in place of the largest."""
        self.free.sort(key=lambda segment: len(segment.bytes))
        for segment in self.free:
            if len(segment.bytes) >= size:
                self.free.remove(segment)
                return segment
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
    """Return the values of a segment, mapped without a copy. They must not be written.

    Raises:
        AwayError: the worker that made it is gone.
    """
    if segment.name not in MAPPED:
        unlinked = [name for name in MAPPED if not (FOLDER / name).exists()]
        for name in unlinked:
            del MAPPED[name]
        try:
            MAPPED[segment.name] = _mapped(segment.name)
        except OSError as error:
            raise AwayError(f"the column {column} can't be read in shared memory: {error}") from error
    values: Any = np.ndarray(segment.shape, segment.dtype, MAPPED[segment.name])
    values.flags.writeable = False  # torch and another array of the same memory do not heed it
    return values


def is_written(values: Any) -> bool:
    """Return whether this process wrote into values that it has read from a segment.

    If it did, the segment is unmapped, since the written pages no longer show what its owner writes there.

    Args:
        values: a contiguous numpy array. If it lies elsewhere, nothing is known, and the answer is False.
    """
    start = values.ctypes.data
    name = _segment_at(start)
    if name is None or not NAMES_WRITTEN_PAGES:
        return False
    first = start // mmap.PAGESIZE
    last = (start + max(values.nbytes, 1) - 1) // mmap.PAGESIZE
    with PAGE_MAP.open("rb", buffering=0) as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * (last - first + 1)), np.uint64)
    in_memory = (pages & (PRESENT | SWAPPED)) != 0
    is_copied = in_memory & ((pages & OF_FILE) == 0)
    if not is_copied.any():
        return False
    del MAPPED[name]
    return True


def _segment_at(address: int) -> str | None:
    """Return the name of the segment that this process has mapped at an address; None if it is none."""
    for name, mapping in MAPPED.items():
        start = np.frombuffer(mapping, np.uint8).ctypes.data
        if start <= address < start + len(mapping):
            return name
    return None


def new_session() -> str:
    """Return a new prefix for the names of a run's segments."""
    return f"{PREFIX}-{token_hex(4)}"


def segments_of(session: str) -> str:
    """Return a glob pattern for the files of all segments of a session."""
    return str(FOLDER / f"{session}-*")


def keep(name: str) -> None:
    """Seal a segment: its creator sees by the file's mode that it may not reuse it."""
    (FOLDER / name).chmod(stat.S_IRUSR)


def _created(session: str, size: int) -> OwnSegment:
    """Create a segment and lock it; ``OSError`` if there is no room, which leaves no file behind."""
    while True:
        name = f"{session}-{token_hex(4)}"
        handle = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        if not os.fstat(handle).st_nlink:
            # a worker that was just starting saw the file before it was locked, and unlinked it
            os.close(handle)
            continue
        resource_tracker.register(f"/{name}", KIND)
        try:
            # allocate the memory now: without it, a page that is missing later would kill the process
            os.posix_fallocate(handle, 0, size)
            return OwnSegment(name, handle, np.frombuffer(mmap.mmap(handle, 0), np.uint8))
        except OSError:
            _unlink(OwnSegment(name, handle, None))
            raise


def _mapped(name: str) -> mmap.mmap:
    """Map a segment copy-on-write, or read-only where written pages are not known; no handle stays open."""
    with open(FOLDER / name, "rb") as file:
        if NAMES_WRITTEN_PAGES:
            # refused where vm.overcommit_memory=2 and there is no memory for a copy of all of it
            with suppress(OSError):
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _unlink(segment: OwnSegment) -> None:
    (FOLDER / segment.name).unlink(missing_ok=True)  # the driver may have been first
    resource_tracker.unregister(f"/{segment.name}", KIND)
    os.close(segment.handle)
