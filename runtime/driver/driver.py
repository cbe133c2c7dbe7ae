"""The driver hands steps to pools, and waits for what they report.

Each pool gets its steps in the order given, and runs them in it. A step is handed over as soon as its calls
are known; those of a balanced layout, say, depend on how many tokens came out. One that must wait holds up
its own pool only. From then on Ray follows the references: a call starts when its inputs are there. A call
costs milliseconds, so a worker gets steps in a row in one, where nobody waits for what the first of them
gives, and the last of them for nothing that the first does not. A move of columns goes with the step behind.

One file: what waits, what is called and what has reported are one state.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, Step
from rlgraph.printing.plan_text import plan_text, sentence
from rlgraph.runtime.cluster.failures import cause, culprit, failure, is_gone
from rlgraph.runtime.cluster.interface import WorkerCluster
from rlgraph.runtime.driver.iteration import Execution, repeated
from rlgraph.runtime.driver.needs import Need, needs_of
from rlgraph.runtime.driver.region import RunningRegion
from rlgraph.runtime.driver.step_calls import WorkerCall, calls_of
from rlgraph.runtime.messages.errors import AwayError
from rlgraph.runtime.messages.tasks import (
    HOST,
    STORE,
    WORKER,
    ColumnRef,
    Place,
    Task,
    TaskCounter,
    place_text,
)

Watch = Callable[[Mapping[str, Step]], None]  # told which step each pool is at
LOOK_S = 0.2  # between two looks at that, which read a file per worker


@dataclass
class Queued:
    """A step that waits for its calls to be known, and what it still needs for that."""

    execution: Execution
    step: Step
    needs: set[Need]

    def is_ready(self) -> bool:
        """Return whether nothing is left that it needs."""
        self.needs = {
            (execution, event) for execution, event in self.needs if event not in execution.happened
        }
        return not self.needs


@dataclass
class StartedStep:
    """A step that was begun: its calls, and, of those that were made, the references of what they return."""

    execution: Execution
    step: Step
    calls: list[WorkerCall]
    beside: bool = False  # whether they run beside the workers
    outputs: dict[Place, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingCall:
    """A call that was made: of which worker, its share of which steps, the references of what it makes."""

    place: Place
    steps: list[tuple[Execution, Step]]
    outputs: list[Any]
    beside: bool = False


class Driver:
    """Steps of one or more iterations in flight: those that wait, and calls that have not reported."""

    def __init__(self, plan: Plan, cluster: WorkerCluster, watch: Watch, logs: Path | None = None) -> None:
        """Create the driver of a run; in the folder ``logs`` workers note which task they are at."""
        self.plan, self.cluster, self.watch, self.logs = plan, cluster, watch, logs
        self.waiting: list[Queued] = []  # they stand in the order in which each pool will get them
        self.open: list[StartedStep] = []  # their calls are known and not made
        self.pending: dict[Any, PendingCall] = {}  # the keys are references of reports
        self.makers: dict[Any, Any] = {}  # reference of a column -> that of its maker's reports
        self.sent_tasks: Counter[Place] = Counter()  # tasks that each worker was given so far
        self.over: dict[Place, list[str]] = {}  # names of what was shared and nobody reads any more
        self.sent: dict[str, int] = {}  # model -> the version that another pool was sent to serve
        self.regions: dict[str, RunningRegion] = {}  # of each region

    def submit(self, steps: Iterable[tuple[Execution, Step]]) -> None:
        """Give the pools steps, behind those that they have."""
        mine = [(execution, step) for execution, step in steps if not repeated(step)]
        self.waiting += [Queued(execution, step, needs_of(execution, step)) for execution, step in mine]
        for execution, step in mine:
            for name, flow in self.regions.items():
                if step.facts.syncs and flow.models & step.models.keys():
                    flow.note_sync(execution.entry.iteration)
                if step.facts.collects and step.region == name:
                    flow.want(execution)
        self._advance()

    def finish(self, execution: Execution) -> None:
        """Collect reports until every step of an execution has its own; raise whatever fails first, anywhere.

        Raises:
            StepError: a step failed, or nothing was reported for ``schedule.timeout`` seconds.
            LostError: a step failed as a worker is gone.
        """
        self._until(lambda: execution.done, execution)

    def settle(self) -> None:
        """Where weights change only between groups, go on until none is begun; raises as ``finish``."""
        for flow in self.regions.values():
            if flow.iteration:
                self._until(flow.is_settled, flow.iteration)

    def _until(self, there: Callable[[], bool], execution: Execution) -> None:
        last, looks, before = time.monotonic(), 0.0, dict[str, Step]()
        while not there():
            assert self.pending, f"steps {sorted(execution.unsubmitted)} wait for what no step makes"
            if (now := time.monotonic()) >= looks:
                running, looks = self._running(), now + LOOK_S
                self.watch(running)
                if running != before:  # a step that begins is a sign of life, as reports are
                    last, before = now, running
            ready, _ = self.cluster.wait([*self.pending], timeout=1.0)
            for reference in ready:
                self._collect(reference)
            if ready:
                last = time.monotonic()
                self._advance()
            elif (silent := time.monotonic() - last) > self.plan.schedule.timeout:
                raise self._too_late(execution, f"nothing came for {silent:.0f} s (schedule.timeout)")

    def _advance(self) -> None:
        """Begin the next round of each region, and hand over what can be, what rows were missing for, too."""
        for flow in self.regions.values():
            try:
                begun = flow.advance()
            except RunError as error:
                assert flow.iteration
                raise self._failed(flow.iteration, flow.collect, (flow.collect.pool, 0), error) from error
            queued = [Queued(*one, needs_of(*one)) for one in begun]
            if sooner := [one for one in queued if one.step.pool in flow.urgent_pools]:
                asks = flow.collect.phase, flow.collect.id
                places = (n for n, one in enumerate(self.waiting) if (one.step.phase, one.step.id) == asks)
                at = next(places, 0)  # before what waits for its rows, and behind its weights
                self.waiting[at:at] = sooner
            self.waiting += [one for one in queued if one.step.pool not in flow.urgent_pools]
        self._hand_over()

    def _hand_over(self) -> None:
        held: set[str] = set()  # pools whose next step must wait
        rest, queue = [], deque(self.waiting)
        while queue:
            queued = queue.popleft()
            execution, step = queued.execution, queued.step
            pools = execution.holds(step)
            if pools & held or not self._is_ready(queued):
                held |= pools
                rest.append(queued)
            else:
                self._start(execution, step)
        self.waiting = rest
        self._send()

    def _is_ready(self, queued: Queued) -> bool:
        """Return whether a step's calls are known; it may read what one of the open steps makes."""
        if not queued.is_ready() and self.open:
            self._send()
        return queued.is_ready()

    def _start(self, execution: Execution, step: Step) -> None:
        """Take up a step: its calls are made with those of the steps behind it, or now."""
        calls = calls_of(execution, step)
        beside = step.id in execution.off_worker
        if not beside and not self._goes_along(execution, calls):
            self._send()
        execution.start(step)
        self.open.append(StartedStep(execution, step, self._needed(execution, step, calls), beside))
        if self.cluster.inline or step.id in execution.awaited:
            self._send()

    def _goes_along(self, execution: Execution, calls: Sequence[WorkerCall]) -> bool:
        """Return whether calls may be made with the open ones, none of which starts later for that."""
        shares = self._shares()
        return all(self._follows(shares.get(call.place, []), execution, call) for call in calls)

    def _follows(
        self, share: Sequence[tuple[StartedStep, WorkerCall]], execution: Execution, call: WorkerCall
    ) -> bool:
        """Return whether a call may come last in a worker's share of the open steps."""
        if all(begun.step.facts.copies for begun, _ in share):
            return True
        awaited = {maker for _, before in share for maker in self._makers(before)}
        return share[-1][0].execution is execution and self._makers(call) <= awaited

    def _makers(self, call: WorkerCall) -> set[Any]:
        """Return references of the reports of calls that make what one is given, and have not reported."""
        return {self.makers[part.location] for part in call.parts if part.location in self.makers}

    def _send(self) -> None:
        """Call each worker once, for its share of all the steps that are open."""
        for place, share in self._shares().items():
            self.watch({place[0]: share[-1][0].step})  # calls that run in this process are not pending yet
            self._call(place, share)
        for begun in self.open:
            for call in begun.calls if begun.beside else ():
                self._call(call.place, [(begun, call)], beside=True)
            begun.execution.submitted(begun.step, begun.outputs)
        self.open = []

    def _shares(self) -> dict[Place, list[tuple[StartedStep, WorkerCall]]]:
        """Return each worker's calls for the steps that are open, but for what runs beside it."""
        shares: dict[Place, list[tuple[StartedStep, WorkerCall]]] = {}
        for begun in self.open:
            for call in begun.calls if not begun.beside else ():
                shares.setdefault(call.place, []).append((begun, call))
        return shares

    def _call(self, place: Place, share: list[tuple[StartedStep, WorkerCall]], beside: bool = False) -> None:
        tasks, parts = list[Task](), list[Any]()
        for begun, call in share:
            refs = list[ColumnRef]()
            for ref in call.parts:
                refs.append(ref if ref.location == WORKER else replace(ref, location=len(parts)))
                parts += [] if ref.location == WORKER else [ref.location]
            makes = begun.execution.parts.destinations(
                begun.step, HOST if self.cluster.shares and not beside else STORE
            )
            makes += (ColumnRef("", STORE),) * call.leaves
            tasks.append(
                Task(call.method, call.args, tuple(refs), makes, begun.execution.parts.drops(begun.step))
            )
        returns = 1 + sum(task.returned for task in tasks)
        if beside:
            reports, *outputs = self.cluster.beside(self.plan, place, tasks, *parts, returns=returns)
        else:
            over = self.over.pop(place, [])
            reports, *outputs = self.cluster.call(place, "perform", tasks, over, *parts, returns=returns)
            self.sent_tasks[place] += len(share)
        self.pending[reports] = PendingCall(
            place, [(begun.execution, begun.step) for begun, _ in share], outputs, beside
        )
        self.makers |= dict.fromkeys(outputs, reports)
        for (begun, _), task in zip(share, tasks, strict=True):
            begun.outputs[place], outputs = outputs[: task.returned], outputs[task.returned :]

    def _needed(self, execution: Execution, step: Step, calls: list[WorkerCall]) -> list[WorkerCall]:
        """Return a step's calls; a sync between pools that brings what is there is none, on both alike."""
        if step.facts.moves == "off" and step.engine == "serve" and step.pool not in self.plan.lenders:
            self.sent = {name: version for name, version in self.sent.items() if name not in step.models}
        if not step.source:
            return calls
        versions = execution.versions(step)
        if versions.items() <= self.sent.items():
            return [replace(call, method="stay") for call in calls]
        self.sent |= versions
        return calls

    def _running(self) -> dict[str, Step]:
        """Return the step that each pool is at: its first worker that has not reported."""
        workers_first = sorted(self.pending.values(), key=lambda asked: asked.beside)
        places = {asked.place[0]: asked.place for asked in reversed(workers_first)}
        return {pool: self._at(place)[1] for pool, place in places.items()}

    def _first(self, execution: Execution) -> tuple[Execution, Step, Place]:
        """Return what an execution waits for: the first of its calls, or of those that it must let pass."""
        every = [*self.pending.values()]
        first = next((asked for asked in every if asked.steps[-1][0] is execution), every[0])
        return (*(first.steps[0] if first.beside else self._at(first.place)), first.place)

    def _at(self, place: Place) -> tuple[Execution, Step]:
        """Return a worker's state: one that is gone fails all its calls at once, reported or not."""
        mine = [asked for asked in self.pending.values() if asked.place == place]
        steps = [one for asked in mine if not asked.beside for one in asked.steps]
        if not steps:
            return mine[0].steps[0]
        begun = TaskCounter(self.logs, *place).last() if self.logs else self.sent_tasks[place]
        first = self.sent_tasks[place] - len(steps)  # tasks that have reported
        return steps[min(max(begun - first - 1, 0), len(steps) - 1)]

    def _collect(self, reference: Any) -> None:
        asked = self.pending[reference]
        try:
            (reports,) = self.cluster.get([reference])
        except Exception as error:
            places = {pending: other.place for pending, other in self.pending.items()}
            place, first = culprit(self.cluster, places, reference, error)
            own = not is_gone(first) or (asked.beside and first is error)
            execution, step = asked.steps[getattr(cause(first), "task", -1)] if own else self._at(place)
            raise self._failed(execution, step, place, first) from error
        del self.pending[reference]
        for part in asked.outputs:
            del self.makers[part]
        for (execution, step), report in zip(asked.steps, reports, strict=True):
            for name, maker in execution.reported(step, asked.place, report):
                self.over.setdefault(maker, []).append(name)

    def _too_late(self, execution: Execution, law: str) -> RunError:
        """Return the error of an execution that stands still: of a worker that can't answer, if any."""
        waiting = {asked.place for asked in self.pending.values()}
        for place, why in self.cluster.unresponsive().items():
            at = self._at(place) if place in waiting else self._first(execution)[:2]
            return self._failed(*at, place, AwayError(f"{law}: {why}"))
        return self._failed(*self._first(execution), RunError(law))

    def _failed(self, execution: Execution, step: Step, place: Place, error: Exception) -> RunError:
        number = execution.entry.iteration + 1
        part = f"iteration {number}" if execution.phase == "train" else "the evaluation"
        marked = plan_text(self.plan, failed=(step.phase, step.id))
        law = f"step {step.id} of {part} failed on {place_text(place)}: {sentence(step)}"
        return failure(marked, law, error)
