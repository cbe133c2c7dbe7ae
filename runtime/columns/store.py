"""The columns that lie with a worker, by their names: those that stay, and those that others read."""

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
    """The parts that one worker keeps of its tasks' columns."""

    def __init__(self, session: str) -> None:
        """Nothing yet; the names of its shared memory begin with ``session``."""
        self.parts: dict[str, Part] = {}
        self.shared = SharedColumns(session)
        self.lent: list[tuple[str, weakref.ref[Any]]] = []  # segments that an op reads, and their values

    def arguments(self, task: Task, sent: Sequence[Part | ColumnRef]) -> list[Part]:
        """Return the parts that a task is given, wherever they lie."""
        return [self._found(ref, sent, lends=task.method == "run") for ref in task.parts]

    def put(self, task: Task, outputs: Sequence[Part]) -> list[Part | ColumnRef]:
        """Store the parts of a task that stay, drop those that nothing needs now, and return the rest."""
        placed = [self._placed(ref, part) for ref, part in zip(task.makes, outputs, strict=True)]
        for name in task.drops:
            del self.parts[name]
        return [one for one in placed if one is not None]

    def settle(self) -> None:
        """End a task: what its op read in shared memory, and something still holds, stays as it is."""
        for segment, values in self.lent:
            if values() is not None:
                keep(segment)
        self.lent = []

    def drop(self, names: Iterable[str]) -> None:
        """Drop what may have been shared by these names, which is over."""
        for name in names:
            self.shared.drop(name)

    def _found(self, ref: ColumnRef, sent: Sequence[Part | ColumnRef], lends: bool) -> Part:
        if ref.location == WORKER:
            return self.parts[ref.name]
        held = sent[ref.location]
        if isinstance(held, Part):
            return held
        segment = held.location
        values = read(held.name, segment)
        self.lent += [(segment.name, weakref.ref(values))] if lends else []
        return Part(values, segment.offsets)

    def _placed(self, ref: ColumnRef, part: Part) -> Part | ColumnRef | None:
        """Return a part as others get it, in shared memory if it is long and has room; None if it stays."""
        if ref.location == WORKER:
            self.parts[ref.name] = part
            return None
        part = part.near()
        long = part.offsets is not None and part.values.nbytes >= LEAST
        return (self.share(ref.name, part) if long and ref.location == HOST else None) or part

    def share(self, name: str, part: Part) -> ColumnRef | None:
        """Copy a part to shared memory; None where there is no room for it."""
        segment = self.shared.put(name, part.values, part.offsets)
        return ColumnRef(name, segment) if segment else None

    def notes(self) -> tuple[str, ...]:
        """Return what a user may want to change."""
        return (FULL,) if self.shared.is_full else ()

    def close(self) -> None:
        """Let go of all of it."""
        self.parts.clear()
        self.shared.close()
