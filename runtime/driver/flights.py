"""Calls in flight: which worker is at which step, and what it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.iteration import Execution
from rlgraph.runtime.messages.tasks import Place, TaskCounter

Reference = Any  # of a report or of a column's chunk: what the cluster returns for a call


@dataclass(frozen=True)
class PendingCall:
    """A call that was made: its worker, the steps that it has a share of, and references of what it makes."""

    place: Place
    steps: Sequence[tuple[Execution, Step]]
    outputs: Sequence[Reference]
    off_worker: bool = False


class CallsInFlight:
    """Calls that have not reported.

    Invariants:
        - A worker runs its calls in the order of ``pending``, except for those off the workers.
        - ``makers`` has the outputs of the calls in ``pending``, and no others.
        - ``sent_tasks`` counts all tasks that a worker was given, those off the workers left out.
    """

    def __init__(self, logs: Path | None = None) -> None:
        """Start without calls; in the folder ``logs`` workers note how many tasks they have begun."""
        self.logs = logs
        self.pending: dict[Reference, PendingCall] = {}  # by the reference of the reports
        self.makers: dict[Reference, Reference] = {}  # by the reference of an output: that of the reports
        self.sent_tasks: Counter[Place] = Counter()

    def add(self, reports: Reference, call: PendingCall) -> None:
        """Note a call that was made."""
        self.pending[reports] = call
        self.makers |= dict.fromkeys(call.outputs, reports)
        if not call.off_worker:
            self.sent_tasks[call.place] += len(call.steps)

    def finish(self, reports: Reference) -> PendingCall:
        """Return a call that has reported; it is in flight no more."""
        call = self.pending.pop(reports)
        for output in call.outputs:
            del self.makers[output]
        return call

    def running(self) -> dict[str, Step]:
        """Return the step that each pool is at: that of its first worker that has not reported."""
        workers_first = sorted(self.pending.values(), key=lambda call: call.off_worker)
        places: dict[str, Place] = {}
        for call in workers_first:
            places.setdefault(call.place[0], call.place)
        return {pool: self.step_at(place)[1] for pool, place in places.items()}

    def awaited_by(self, execution: Execution) -> tuple[Execution, Step, Place]:
        """Return what an execution waits for: its first call, or the first of those that it must let pass."""
        calls = [*self.pending.values()]
        call = calls[0]
        for candidate in calls:
            if candidate.steps[-1][0] is execution:
                call = candidate
                break
        running, step = call.steps[0] if call.off_worker else self.step_at(call.place)
        return running, step, call.place

    def step_at(self, place: Place) -> tuple[Execution, Step]:
        """Return the step that a worker is at.

        A worker that is gone fails all its calls at once, reported or not: so its count of tasks says which
        step it had begun.
        """
        calls = [call for call in self.pending.values() if call.place == place]
        steps = list[tuple[Execution, Step]]()
        for call in calls:
            if not call.off_worker:
                steps += call.steps
        if not steps:
            return calls[0].steps[0]
        started = self.sent_tasks[place]
        if self.logs:
            started = TaskCounter(self.logs, *place).last()
        reported = self.sent_tasks[place] - len(steps)
        index = max(started - reported - 1, 0)
        return steps[min(index, len(steps) - 1)]

    def places(self) -> dict[Reference, Place]:
        """Return the worker of each call, by the reference of its reports."""
        return {reports: call.place for reports, call in self.pending.items()}
