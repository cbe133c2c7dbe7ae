"""The driver hands steps to pools, and waits for what they report.

    submit ──> queue ──> batch ──> calls in flight ──> reports ──> events that steps in the queue need

Each pool gets its steps in the order given, and runs them in it. A step leaves the queue as soon as its calls
are known; those of a balanced layout, say, depend on how many tokens came out. A step that must wait holds up
its own pool only. From then on Ray follows the references: a call starts when its inputs are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rlgraph.errors import RunError
from rlgraph.ir.actions import Collect, Sync
from rlgraph.ir.plan import Plan, Step
from rlgraph.printing.plan_text import plan_text
from rlgraph.printing.step_text import sentence
from rlgraph.runtime.cluster.failures import cause, culprit, failure, is_gone
from rlgraph.runtime.cluster.interface import WorkerCluster
from rlgraph.runtime.driver.batches import CallBatcher, StartedStep, WorkerBatch
from rlgraph.runtime.driver.flights import CallsInFlight, PendingCall, Reference
from rlgraph.runtime.driver.iteration import Execution, repeated
from rlgraph.runtime.driver.queue import StepQueue
from rlgraph.runtime.driver.region import RunningRegion
from rlgraph.runtime.driver.step_calls import calls_of
from rlgraph.runtime.driver.versions import ServedVersions
from rlgraph.runtime.messages.errors import AwayError
from rlgraph.runtime.messages.tasks import HOST, STORE, Place, place_text

Watch = Callable[[Mapping[str, Step]], None]  # is called with the step that each pool is at
LOOK_SECONDS = 0.2  # between two looks at that, which read a file per worker


class Driver:
    """Carries out the steps of one or more iterations in flight.

    Invariants:
        - A submitted step is in exactly one place: the queue, the batch, in flight, or reported.
        - A step in the batch has an execution that knows of its start; it is called before the driver waits.
        - Names in ``over`` are of shared columns that no call in flight reads.
    """

    def __init__(self, plan: Plan, cluster: WorkerCluster, watch: Watch, logs: Path | None = None) -> None:
        """Create the driver of a run; in the folder ``logs`` workers note which task they are at."""
        self.plan = plan
        self.cluster = cluster
        self.watch = watch
        self.queue = StepQueue()
        self.batch = CallBatcher()
        self.flights = CallsInFlight(logs)
        self.served = ServedVersions(plan.lenders)
        self.regions: dict[str, RunningRegion] = {}
        self.over: dict[Place, list[str]] = {}  # worker -> names of what was shared and nobody reads any more

    def submit(self, steps: Iterable[tuple[Execution, Step]]) -> None:
        """Give the pools steps, behind those that they have."""
        submissions = [(execution, step) for execution, step in steps if not repeated(step)]
        self.queue.append(submissions)
        for execution, step in submissions:
            for region in self.regions.values():
                if isinstance(step.action, Sync) and region.plan.models & step.models.keys():
                    region.note_sync(execution.entry.iteration)
            if isinstance(step.action, Collect) and step.region in self.regions:
                self.regions[step.region].want(execution)
        self._advance()

    def finish(self, execution: Execution) -> None:
        """Collect reports until every step of an execution has its own; raise whatever fails first, anywhere.

        Raises:
            StepError: a step failed, or nothing was reported for ``schedule.timeout`` seconds.
            LostError: a step failed as a worker is gone.
        """
        self._run_until(lambda: execution.done, execution)

    def settle(self) -> None:
        """Go on until no group is begun, if weights change only between groups; raises as ``finish``."""
        for region in self.regions.values():
            if region.iteration:
                self._run_until(region.is_settled, region.iteration)

    def _run_until(self, is_reached: Callable[[], bool], execution: Execution) -> None:
        last_sign = time.monotonic()
        next_look = 0.0
        running: Mapping[str, Step] = {}
        while not is_reached():
            assert self.flights.pending, f"steps {sorted(execution.unsubmitted)} wait for what no step makes"

            # 1. Show where each pool is. A step that begins is a sign of life, as reports are.
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                running_now = self.flights.running()
                self.watch(running_now)
                if running_now != running:
                    last_sign = now
                    running = running_now

            # 2. Wait for reports.
            ready, _ = self.cluster.wait([*self.flights.pending], timeout=1.0)
            if not ready:
                silent = time.monotonic() - last_sign
                if silent > self.plan.schedule.timeout:
                    law = f"nothing came for {silent:.0f} s (schedule.timeout)"
                    raise self._timed_out(execution, law)
                continue

            # 3. Note them: columns have their rows, regions their groups.
            for reports in ready:
                self._collect(reports)
            last_sign = time.monotonic()

            # 4. Make the calls that are known now.
            self._advance()

    def _advance(self) -> None:
        """Begin the next round of each region, and start the steps whose calls are known."""
        for region in self.regions.values():
            self._queue_rounds(region)
        for execution, step in self.queue.ready(self._call_started):
            self._start(execution, step)
        self._call_started()

    def _queue_rounds(self, region: RunningRegion) -> None:
        try:
            submissions = region.advance()
        except RunError as error:
            assert region.iteration
            place = region.plan.collect.pool, 0
            raise self._failed(region.iteration, region.plan.collect, place, error) from error
        urgent = list[tuple[Execution, Step]]()
        later = list[tuple[Execution, Step]]()
        for execution, step in submissions:
            submitted = urgent if step.pool in region.plan.urgent_pools else later
            submitted.append((execution, step))
        self.queue.insert_before(region.plan.collect, urgent)
        self.queue.append(later)

    def _start(self, execution: Execution, step: Step) -> None:
        """Take up a step: its calls are made with those of the steps behind it, or now."""
        calls = calls_of(execution, step)
        off_worker = step.id in execution.off_worker
        if not off_worker and not self.batch.accepts(execution, calls, self.flights.makers):
            self._call_started()
        execution.start(step)
        sent_versions = execution.versions(step) if step.source else {}
        calls = self.served.needed_calls(step, calls, sent_versions)
        self.batch.add(StartedStep(execution, step, calls, off_worker))
        if self.cluster.inline or step.id in execution.awaited:
            self._call_started()

    def _call_started(self) -> None:
        """Call each worker once, for its share of all the steps that are started."""
        steps, batches = self.batch.take()
        for batch in batches:
            self._call(batch)
        for started in steps:
            started.execution.submitted(started.step, started.outputs)

    def _call(self, batch: WorkerBatch) -> None:
        place = batch.place
        share = batch.share
        is_shared = self.cluster.shares and not batch.off_worker
        tasks, references = batch.tasks(HOST if is_shared else STORE)
        returns = 1 + sum(task.returned for task in tasks)
        if batch.off_worker:
            results = self.cluster.call_off_device(self.plan, place, tasks, *references, returns=returns)
        else:
            self.watch({place[0]: share[-1][0].step})  # a call that runs in this process is not in flight yet
            over = self.over.pop(place, [])
            results = self.cluster.call(place, "perform", tasks, over, *references, returns=returns)
        reports, *outputs = results
        steps = [(started.execution, started.step) for started, _ in share]
        self.flights.add(reports, PendingCall(place, steps, outputs, batch.off_worker))
        for (started, _), task in zip(share, tasks, strict=True):
            started.outputs[place] = outputs[: task.returned]
            outputs = outputs[task.returned :]

    def _collect(self, reference: Reference) -> None:
        """Note the reports of a call."""
        try:
            (reports,) = self.cluster.get([reference])
        except Exception as error:
            raise self._attributed(reference, error) from error
        call = self.flights.finish(reference)
        for (execution, step), report in zip(call.steps, reports, strict=True):
            for name, place in execution.reported(step, call.place, report):
                self.over.setdefault(place, []).append(name)

    def _attributed(self, reference: Reference, error: Exception) -> RunError:
        """Return the error of a call that failed, of the worker and the step whose fault it is."""
        call = self.flights.pending[reference]
        place, original = culprit(self.cluster, self.flights.places(), reference, error)
        is_of_call = not is_gone(original) or (call.off_worker and original is error)
        if is_of_call:
            execution, step = call.steps[getattr(cause(original), "task", -1)]
        else:
            execution, step = self.flights.step_at(place)
        return self._failed(execution, step, place, original)

    def _timed_out(self, execution: Execution, law: str) -> RunError:
        """Return the error of an execution that stands still: of a worker that can't answer, if any."""
        waiting = {call.place for call in self.flights.pending.values()}
        for place, why in self.cluster.unresponsive().items():
            running, step, _ = self.flights.awaited_by(execution)
            if place in waiting:
                running, step = self.flights.step_at(place)
            return self._failed(running, step, place, AwayError(f"{law}: {why}"))
        return self._failed(*self.flights.awaited_by(execution), RunError(law))

    def _failed(self, execution: Execution, step: Step, place: Place, error: Exception) -> RunError:
        """Return an error with the plan, marked where it failed."""
        stage = "the evaluation"
        if execution.phase == "train":
            stage = f"iteration {execution.entry.iteration + 1}"
        marked = plan_text(self.plan, failed=(step.phase, step.id))
        law = f"step {step.id} of {stage} failed on {place_text(place)}: {sentence(step)}"
        return failure(marked, law, error)
