"""The columns of one worker by name: those that only its tasks read, and those that other workers read."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from rlgraph.runtime.columns.chunk import Chunk
from rlgraph.runtime.columns.shared_memory import LEAST, SharedColumns, keep, read
from rlgraph.runtime.messages.tasks import HOST, WORKER, ColumnRef, Task

FULL = (
    "shared memory (/dev/shm) has no room for a column: it goes through Ray's object store instead\n"
    "  give the container more of it (docker: --shm-size)"
)


class Store:
    """The columns that one worker holds for its tasks.

    Attributes:
        resident: columns that stay on this worker, by column.
        shared: the shared memory of columns that other workers read.
        borrowed: segments of shared memory that the current task's op reads, with their values.
    """

    def __init__(self, session: str) -> None:
        """Create an empty store whose shared memory has names that begin with ``session``."""
        self.resident: dict[str, Chunk] = {}
        self.shared = SharedColumns(session)
        self.borrowed: list[tuple[str, weakref.ref[Any]]] = []

    def arguments(self, task: Task, arguments: Sequence[Chunk | ColumnRef]) -> list[Chunk]:
        """Return the columns that a task reads: resident here, passed with the call, or in shared memory."""
        runs_op = task.method == "run"
        return [self._column(ref, arguments, is_borrowed=runs_op) for ref in task.inputs]

    def put(self, task: Task, outputs: Sequence[Chunk]) -> list[Chunk | ColumnRef]:
        """Store the outputs that stay here, drop columns that nothing reads any more; return the others."""
        returned: list[Chunk | ColumnRef] = []
        for ref, chunk in zip(task.outputs, outputs, strict=True):
            if ref.location == WORKER:
                self.resident[ref.name] = chunk
            else:
                returned.append(self._for_others(ref, chunk))
        for name in task.drops:
            del self.resident[name]
        return returned

    def settle(self) -> None:
        """End a task; a segment whose values its op still holds must never be written again."""
        for segment, values in self.borrowed:
            if values() is not None:
                keep(segment)
        self.borrowed = []

    def drop(self, names: Iterable[str]) -> None:
        """Free the shared memory of these columns, those among them that are in it."""
        for name in names:
            self.shared.drop(name)

    def _column(self, ref: ColumnRef, arguments: Sequence[Chunk | ColumnRef], is_borrowed: bool) -> Chunk:
        if ref.location == WORKER:
            return self.resident[ref.name]
        argument = arguments[ref.location]
        if isinstance(argument, Chunk):
            return argument
        segment = argument.location
        values = read(argument.name, segment)
        if is_borrowed:
            self.borrowed.append((segment.name, weakref.ref(values)))
        return Chunk(values, segment.offsets)

    def _for_others(self, ref: ColumnRef, chunk: Chunk) -> Chunk | ColumnRef:
        """Return a column as other workers get it: in shared memory if it is long and there is room."""
        chunk = chunk.near()
        is_long = chunk.offsets is not None and chunk.values.nbytes >= LEAST
        if is_long and ref.location == HOST:
            shared = self.share(ref.name, chunk)
            if shared is not None:
                return shared
        return chunk

    def share(self, name: str, chunk: Chunk) -> ColumnRef | None:
        """Copy a column to shared memory; None if there is no room."""
        segment = self.shared.put(name, chunk.values, chunk.offsets)
        return ColumnRef(name, segment) if segment else None

    def notes(self) -> tuple[str, ...]:
        """Return advice for the user."""
        return (FULL,) if self.shared.is_full else ()

    def close(self) -> None:
        """Drop all columns, and unlink the shared memory."""
        self.resident.clear()
        self.shared.close()
