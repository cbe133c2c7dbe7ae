"""Ops that run beside the devices: each share of a step is a task of Ray, on a CPU of its worker's host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from rlgraph.plan import Plan
from rlgraph.runtime.columns import Part
from rlgraph.runtime.lent import Lent
from rlgraph.runtime.tasks import Task
from rlgraph.runtime.worker import Worker


def perform(plan: Plan, place: tuple[str, int], logs: str, tasks: Sequence[Task], *parts: Part | Lent) -> Any:
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
    """The one of this process."""
    return Worker(threads=1, log=f"{logs}/beside-{os.getpid()}.log", beside=True)
