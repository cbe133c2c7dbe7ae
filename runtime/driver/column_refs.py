"""The places of the chunks of an execution's columns, and the steps that still read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from rlgraph.ir.plan import Step
from rlgraph.runtime.columns import layouts
from rlgraph.runtime.driver.row_buffer import Selection
from rlgraph.runtime.driver.rows import Rows, staying
from rlgraph.runtime.messages.tasks import STORE, WORKER, ColumnRef, Place

EXECUTIONS = count()


class RefTable:
    """References to the chunks of columns, from the call of the step that writes them to their last reader.

    Invariants:
        - ``refs`` has a column from when its step is called until its last reader is, or longer if it is
          kept.
        - A column in ``staying`` has no chunk outside the worker that made it, and is named as early as its
          step
          starts; all others are named when the calls are made.
        - A column in ``shared`` is over, on every worker of its pool, when the last step that reads or
          writes it
          has reported from all devices.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        sizes: Mapping[str, int],
        pools: Mapping[str, str],
        keep: Collection[str],
        off_worker: Collection[int],
        may_share: bool,
    ) -> None:
        """Start without chunks.

        Args:
            steps: of the execution.
            sizes: devices of each pool.
            pools: the pool of each column.
            keep: columns that stay in ``refs`` after their last reader.
            off_worker: numbers of steps that no worker runs.
            may_share: whether columns may be in shared memory.
        """
        self.number = next(EXECUTIONS)
        self.sizes = sizes
        self.pools = pools
        columns = Counter(column for step in steps for column in {*step.reads, *step.writes})
        self.uncalled = columns  # column -> how many of its steps have not been called
        self.unreported = columns.copy()  # column -> how many of its steps have not reported
        self.freed = {column for step in steps for column in step.frees} - {*keep}
        self.staying = staying(steps, off_worker) & self.freed
        self.shared = frozenset(self.freed - self.staying) if may_share else frozenset[str]()
        self.refs: dict[str, list[ColumnRef | None]] = {}  # column -> one per device of its pool
        self.unfinished: dict[
            int, list[ColumnRef]
        ] = {}  # device -> what each column of its samples has so far

    def name(self, column: str) -> str:
        """Return the name of a column's chunks on workers."""
        return f"{column} of execution {self.number}"

    def destinations(self, step: Step, shared: str) -> tuple[ColumnRef, ...]:
        """Return where the columns go that a step writes; ``shared`` is where columns go that others read."""
        refs = []
        for column in step.writes:
            location = STORE
            if column in self.shared:
                location = shared
            if column in self.staying:
                location = WORKER
            refs.append(ColumnRef(self.name(column), location))
        return tuple(refs)

    def drops(self, step: Step) -> tuple[str, ...]:
        """Return the names of columns that a step is the last to need."""
        return tuple(self.name(column) for column in step.frees if column in self.staying)

    def start(self, step: Step) -> set[str]:
        """Return the columns of a step that steps behind it may read before its calls are made."""
        columns = set(self.staying.intersection(step.writes))
        for column in columns:
            self.refs[column] = [ColumnRef(self.name(column))] * self.sizes[step.pool]
        return columns

    def add_outputs(self, step: Step, outputs: Mapping[Place, Sequence[Any]]) -> list[str]:
        """Note the references that a step's calls return; return the columns that these are of."""
        returned = [column for column in step.writes if column not in self.staying]
        for index, column in enumerate(returned):
            refs: list[ColumnRef | None] = [None] * self.sizes[step.pool]
            for (_, device), references in outputs.items():
                refs[device] = ColumnRef(self.name(column), references[index])
            self.refs[column] = refs
        if step.unfinished:
            for (_, device), references in outputs.items():
                self.unfinished[device] = [ColumnRef("", ref) for ref in references[len(returned) :]]
        # pools get ahead of one another, so the last to read a column need not be the one the plan names
        for column in {*step.reads, *step.writes}:
            self.uncalled[column] -= 1
            if not self.uncalled[column] and column in self.freed:
                self.refs.pop(column, None)  # a collect reads columns of rounds
        return returned

    def finish(self, step: Step) -> list[tuple[str, Place]]:
        """Note that all devices of a step have reported; return what was shared, and where, and is over."""
        columns = {*step.reads, *step.writes}
        self.unreported.subtract(columns)
        over = list[tuple[str, Place]]()
        for column in columns & self.shared:
            if not self.unreported[column]:
                pool = self.pools[column]
                over += [(self.name(column), (pool, device)) for device in range(self.sizes[pool])]
        return over

    def reference(self, column: str, device: int) -> ColumnRef:
        """Return the reference of a column's chunk on a device of the pool that wrote it."""
        ref = self.refs[column][device]
        assert ref, f"device {device} has no rows of {column}"
        return ref

    def selection(self, column: str, rows: Rows) -> Selection:
        """Return all rows of a column."""
        plan = rows.columns[column]
        layout = rows.layout(plan.domain, plan.layout, self.pools[column])
        owner, place = layouts.where(layout, rows.count(plan.domain))
        sizes = tuple(len(device_rows) for device_rows in layout)
        start = np.cumsum((0, *sizes))
        return Selection(tuple(self.refs[column]), sizes, start[owner] + place)
