"""The parts of columns that stay with a worker, by their names: see ``tasks.py``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rlgraph.runtime.columns import Part
from rlgraph.runtime.lent import LEAST, Lent, lend
from rlgraph.runtime.tasks import Sent, Task


class Shelf:
    """What one worker keeps of what its tasks made."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.parts: dict[str, Part] = {}

    def given(self, task: Task, sent: Sequence[Part | Lent]) -> list[Part | Lent]:
        """The parts that a task is given, some of which lie here."""
        read = [sent[one.number] if isinstance(one, Sent) else self.parts[one.name] for one in task.parts]
        return [self.parts[one.name] if _is_own(one) else one for one in read]

    def put(self, task: Task, made: Sequence[Part]) -> list[Part | Lent]:
        """Keep what stays of what a task made, and drop what nothing needs any more; the rest is returned."""
        self.parts |= {name: part for name, part in zip(task.keeps, made, strict=True) if name}
        for name in task.drops:
            del self.parts[name]
        rest = [part for name, part in zip(task.keeps, made, strict=True) if not name]
        return [self._lent(name, part) if name else part for name, part in zip(task.lends, rest, strict=True)]

    def drop(self, names: Iterable[str]) -> None:
        """What may have been lent by these names, and is over."""
        for name in names:
            self.parts.pop(name, None)  # not there if it was too short

    def _lent(self, name: str, part: Part) -> Part | Lent:
        """A part as others get it: lent where it is long, and then it stays; else as it is."""
        if part.offsets is None or part.values.nbytes < LEAST:
            return part
        self.parts[name] = part
        return lend(name, part.values, part.offsets)


def _is_own(part: Part | Lent) -> bool:
    return isinstance(part, Lent) and part.process == os.getpid()
