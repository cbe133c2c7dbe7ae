"""CPU tasks: each share of an op beside the devices is a Ray task on a CPU of its worker's host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from rlgraph.ir.plan import Plan
from rlgraph.runtime.columns.part import Part
from rlgraph.runtime.messages.column_ref import ColumnRef
from rlgraph.runtime.messages.place import Place
from rlgraph.runtime.messages.tasks import Task
from rlgraph.runtime.worker.worker import Worker


def perform(plan: Plan, place: Place, logs: str, tasks: Sequence[Task], *parts: Part | ColumnRef) -> Any:
    """Carry out tasks that need no engine: as ``Worker.perform``, in whichever process this is.

    Args:
        plan: what is run.
        place: pool and device of the worker whose share of a step it is.
        logs: the folder for what this process prints.
        tasks: to carry out.
        parts: that they are given.
    """
    worker = _worker(logs)
    worker.plan, worker.at = plan, place
    return worker.perform(tasks, (), *parts)


@cache
def _worker(logs: str) -> Worker:
    """Return the worker of this process."""
    return Worker(threads=1, log=f"{logs}/beside-{os.getpid()}.log", beside=True)
