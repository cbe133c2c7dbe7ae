"""The columns of one worker by name: those that only its tasks read, and those that other workers read."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from rlgraph.runtime.columns.part import Part
from rlgraph.runtime.columns.shared_memory import LEAST, SharedColumns, keep, read
from rlgraph.runtime.messages.tasks import HOST, WORKER, ColumnRef, Task

FULL = (
    "shared memory (/dev/shm) has no room for a column: it goes through Ray's object store instead\n"
    "  give the container more of it (docker: --shm-size)"
)


class Store:
    """The parts of columns that one worker holds for its tasks.

    Attributes:
        parts: parts that stay on this worker, by column.
        shared: the shared memory of parts that other workers read.
        borrowed: segments of shared memory that the current task's op reads, with their values.
    """

    def __init__(self, session: str) -> None:
        """Create an empty store whose shared memory has names that begin with ``session``."""
        self.parts: dict[str, Part] = {}
        self.shared = SharedColumns(session)
        self.borrowed: list[tuple[str, weakref.ref[Any]]] = []

    def arguments(self, task: Task, sent: Sequence[Part | ColumnRef]) -> list[Part]:
        """Return the parts that a task reads: held here, sent with the call, or in shared memory."""
        runs_op = task.method == "run"
        return [self._part(ref, sent, is_borrowed=runs_op) for ref in task.parts]

    def put(self, task: Task, outputs: Sequence[Part]) -> list[Part | ColumnRef]:
        """Store the outputs that stay here, drop columns that nothing reads any more; return the others."""
        sent: list[Part | ColumnRef] = []
        for ref, part in zip(task.makes, outputs, strict=True):
            if ref.location == WORKER:
                self.parts[ref.name] = part
            else:
                sent.append(self._for_others(ref, part))
        for name in task.drops:
            del self.parts[name]
        return sent

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

    def _part(self, ref: ColumnRef, sent: Sequence[Part | ColumnRef], is_borrowed: bool) -> Part:
        if ref.location == WORKER:
            return self.parts[ref.name]
        argument = sent[ref.location]
        if isinstance(argument, Part):
            return argument
        segment = argument.location
        values = read(argument.name, segment)
        if is_borrowed:
            self.borrowed.append((segment.name, weakref.ref(values)))
        return Part(values, segment.offsets)

    def _for_others(self, ref: ColumnRef, part: Part) -> Part | ColumnRef:
        """Return a part as other workers get it: in shared memory if it is long and there is room."""
        part = part.near()
        is_long = part.offsets is not None and part.values.nbytes >= LEAST
        if is_long and ref.location == HOST:
            shared = self.share(ref.name, part)
            if shared is not None:
                return shared
        return part

    def share(self, name: str, part: Part) -> ColumnRef | None:
        """Copy a part to shared memory; None if there is no room."""
        segment = self.shared.put(name, part.values, part.offsets)
        return ColumnRef(name, segment) if segment else None

    def notes(self) -> tuple[str, ...]:
        """Return advice for the user."""
        return (FULL,) if self.shared.is_full else ()

    def close(self) -> None:
        """Drop all columns, and unlink the shared memory."""
        self.parts.clear()
        self.shared.close()
