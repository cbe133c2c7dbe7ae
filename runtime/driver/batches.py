"""The batching of calls: which steps go to a worker in one call.

A call costs milliseconds, so a worker gets several steps in a row in one. A step may join those before it
where no call starts later for that: its call waits for nothing that theirs do not wait for, too. A move of
columns goes with the step behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from rlgraph.ir.actions import Copy
from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.flights import Reference
from rlgraph.runtime.driver.iteration import Execution
from rlgraph.runtime.driver.step_calls import WorkerCall
from rlgraph.runtime.messages.tasks import STORE, WORKER, ColumnRef, Place, Task


@dataclass
class StartedStep:
    """A step whose calls are known; once they are made, ``outputs`` has the references that they return."""

    execution: Execution
    step: Step
    calls: list[WorkerCall]
    off_worker: bool = False  # whether its calls run in processes beside the workers
    outputs: dict[Place, list[Reference]] = field(default_factory=dict)


@dataclass(frozen=True)
class ShareSummary:
    """The properties of a worker's share of the started steps that decide whether another step joins it."""

    only_copies: bool  # whether it only moves columns
    execution: int  # the number of the execution of its last step
    awaits: AbstractSet[Reference]  # reports of calls in flight that it waits for


@dataclass(frozen=True)
class WorkerBatch:
    """A call to be made: the calls of several steps on one worker, in order."""

    place: Place
    share: list[tuple[StartedStep, WorkerCall]]
    off_worker: bool

    def tasks(self, shared: str) -> tuple[list[Task], list[Reference]]:
        """Return the tasks of the call, and the references that follow them; tasks have places among these.

        ``shared`` is where columns go that other workers read.
        """
        tasks = list[Task]()
        references = list[Reference]()
        for started, call in self.share:
            reads = list[ColumnRef]()
            for ref in call.refs:
                if ref.location == WORKER:
                    reads.append(ref)
                else:
                    reads.append(replace(ref, location=len(references)))
                    references.append(ref.location)
            table = started.execution.ref_table
            writes = table.destinations(started.step, shared)
            writes += (ColumnRef("", STORE),) * call.unfinished_columns
            tasks.append(Task(call.method, call.args, tuple(reads), writes, table.drops(started.step)))
        return tasks, references


def goes_along(
    shares: Mapping[Place, ShareSummary], execution: int, awaits: Mapping[Place, AbstractSet[Reference]]
) -> bool:
    """Return whether a step's calls may be made with those of the steps before it, and none starts later.

    Args:
        shares: of each worker that has a share of the steps before it.
        execution: the number of the step's execution.
        awaits: for each worker that the step calls, the reports of calls in flight for which that call waits.

    Example:
        >>> share = ShareSummary(only_copies=False, execution=3, awaits={"rollout"})
        >>> place = ("main", 0)
        >>> goes_along({place: share}, 3, {place: {"rollout"}}), goes_along({place: share}, 3, {place: set()})
        (True, True)
        >>> goes_along({place: share}, 3, {place: {"reward"}}), goes_along({place: share}, 4, {place: set()})
        (False, False)
    """
    for place, awaited in awaits.items():
        share = shares.get(place)
        if share is None or share.only_copies:
            continue
        if share.execution != execution:
            return False
        if not awaited <= share.awaits:
            return False
    return True


class CallBatcher:
    """The steps whose calls are known and not made.

    Invariants:
        - Each worker has one call for all of ``started``, but for steps that run off the workers.
        - ``shares`` has the calls of each worker, in the order in which their steps were started.
    """

    def __init__(self) -> None:
        self.started: list[StartedStep] = []
        self.shares: dict[Place, list[tuple[StartedStep, WorkerCall]]] = {}

    def add(self, started: StartedStep) -> None:
        """Add a step: its calls are made with those before it."""
        self.started.append(started)
        if not started.off_worker:
            for call in started.calls:
                self.shares.setdefault(call.place, []).append((started, call))

    def accepts(
        self, execution: Execution, calls: Sequence[WorkerCall], makers: Mapping[Reference, Reference]
    ) -> bool:
        """Return whether a step's calls may be made with those of the started steps.

        ``makers`` has the report of each call in flight, by the references of what that call makes.
        """
        if not self.started:
            return True
        awaits = {call.place: _awaited([call], makers) for call in calls}
        summaries = dict[Place, ShareSummary]()
        for place in awaits.keys() & self.shares.keys():
            summaries[place] = _summary(self.shares[place], makers)
        return goes_along(summaries, execution.ref_table.number, awaits)

    def take(self) -> tuple[list[StartedStep], list[WorkerBatch]]:
        """Return the started steps, and the calls by which they are carried out; there are none left."""
        batches = [WorkerBatch(place, share, off_worker=False) for place, share in self.shares.items()]
        for started in self.started:
            if started.off_worker:
                batches += [WorkerBatch(call.place, [(started, call)], True) for call in started.calls]
        started_steps = self.started
        self.started = []
        self.shares = {}
        return started_steps, batches


def _summary(
    share: Sequence[tuple[StartedStep, WorkerCall]], makers: Mapping[Reference, Reference]
) -> ShareSummary:
    latest, _ = share[-1]
    return ShareSummary(
        only_copies=all(isinstance(started.step.action, Copy) for started, _ in share),
        execution=latest.execution.ref_table.number,
        awaits=_awaited([call for _, call in share], makers),
    )


def _awaited(calls: Sequence[WorkerCall], makers: Mapping[Reference, Reference]) -> set[Reference]:
    """Return the reports of calls in flight that make what some calls are given."""
    reports = set[Reference]()
    for call in calls:
        reports |= {makers[ref.location] for ref in call.refs if ref.location in makers}
    return reports
