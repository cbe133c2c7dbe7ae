"""The driver hands steps to pools, and waits for what they report.

Each pool gets its steps in the order given, and runs them in it. A step is handed over as soon as its calls
are known; those of a balanced layout, say, depend on how many tokens came out. One that must wait holds up
its own pool only. From then on Ray follows the references: a call starts when its inputs are there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rlgraph.errors import RunError
from rlgraph.plan import Plan, Step
from rlgraph.runtime.cluster import Cluster, Place, place_text
from rlgraph.runtime.failure import culprit, failure, is_gone
from rlgraph.runtime.rounds import more
from rlgraph.runtime.rows import NotYet
from rlgraph.runtime.stream import repeated
from rlgraph.runtime.walk import Call, Walk
from rlgraph.text import plan_text, sentence

Watch = Callable[[Mapping[str, Step]], None]  # told which step each pool is at


class Driver:
    """Steps of one or more iterations in flight: those that wait, and calls that have not reported."""

    def __init__(self, plan: Plan, cluster: Cluster, watch: Watch) -> None:
        self.plan, self.cluster, self.watch = plan, cluster, watch
        self.waiting: list[tuple[Walk, Step]] = []  # in the order in which each pool will get them
        self.pending: dict[Any, tuple[Walk, Step, Place]] = {}  # by the reference of a report
        self.sent: dict[str, int] = {}  # model -> the version that another pool was sent to serve

    def submit(self, steps: Iterable[tuple[Walk, Step]]) -> None:
        """Give the pools steps, behind those that they have."""
        self.waiting += [(walk, step) for walk, step in steps if not repeated(step)]
        self._hand_over()

    def finish(self, walk: Walk) -> None:
        """Collect reports until every step of a walk has its own. Whatever fails first, anywhere, is raised.

        Raises:
            StepError: a step failed, or nothing was reported for ``schedule.timeout`` seconds.
            LostError: a step failed as a worker is gone.
        """
        last = time.monotonic()
        while not walk.done:
            assert self.pending, f"steps {sorted(walk.unsubmitted)} wait for what no step makes"
            first = self._first(walk)
            self.watch(self._running())
            ready, _ = self.cluster.wait([*self.pending], timeout=1.0)
            for reference in ready:
                self._collect(reference)
            if ready:
                last = time.monotonic()
                self._hand_over()
            elif (silent := time.monotonic() - last) > self.plan.schedule["timeout"]:
                raise self._failed(*first, RunError(f"nothing came for {silent:.0f} s (schedule.timeout)"))

    def _hand_over(self) -> None:
        held: set[str] = set()  # pools whose next step must wait
        rest, queue = [], deque(self.waiting)
        while queue:
            walk, step = queue.popleft()
            pools = walk.holds(step)
            if not pools & held and (begun := self._more(walk, step)):
                queue.extendleft(reversed([*begun, (walk, step)]))
            elif pools & held or not self._start(walk, step):
                held |= pools
                rest.append((walk, step))
        self.waiting = rest

    def _more(self, walk: Walk, step: Step) -> list[tuple[Walk, Step]]:
        """Steps that come before one: those of its region's next round."""
        try:
            return more(walk, step)
        except RunError as error:
            raise self._failed(walk, step, (step.pool, 0), error) from error

    def _start(self, walk: Walk, step: Step) -> bool:
        """Make a step's calls, if they are known."""
        try:
            calls = walk.calls(step)
        except NotYet:
            return False
        made = {}
        self.watch({step.pool: step})  # where calls run in this process, none is pending while it runs
        for call in self._needed(walk, step, calls):
            outputs = len(step.writes) + call.leaves
            made[call.place] = self.cluster.call(call.place, call.method, *call.args, returns=1 + outputs)
            self.pending[made[call.place][0]] = walk, step, call.place
        walk.submitted(step, made)
        return True

    def _needed(self, walk: Walk, step: Step, calls: list[Call]) -> list[Call]:
        """A sync between pools that brings what is there already is none, on both of them alike."""
        versions = walk.versions(step)
        if step.kind == "sleep":
            self.sent = {model: version for model, version in self.sent.items() if model not in versions}
        if not step.source:
            return calls
        if versions.items() <= self.sent.items():
            return [replace(call, method="stay") for call in calls]
        self.sent |= versions
        return calls

    def _running(self) -> dict[str, Step]:
        """The step that each pool is at: the first of its calls that has not reported."""
        return {place[0]: step for _, step, place in reversed(self.pending.values())}

    def _first(self, walk: Walk) -> tuple[Walk, Step, Place]:
        """What a walk waits for: the first of its calls, or of those that it must let pass."""
        own = (entry for entry in self.pending.values() if entry[0] is walk)
        return next(own, None) or next(iter(self.pending.values()))

    def _collect(self, reference: Any) -> None:
        walk, step, place = self.pending[reference]
        try:
            (report,) = self.cluster.get([reference])
        except Exception as error:
            places = {pending: entry[2] for pending, entry in self.pending.items()}
            place, first = culprit(self.cluster, places, reference, error)
            walk, step = self._lost(place) if is_gone(first) else (walk, step)
            raise self._failed(walk, step, place, first) from error
        del self.pending[reference]
        walk.reported(step, place, report)

    def _lost(self, place: Place) -> tuple[Walk, Step]:
        """Where a worker was that is gone: it fails all its calls at once, in any order."""
        for reference, (walk, step, at) in self.pending.items():
            if at == place and not self._has_report(reference):
                return walk, step
        raise AssertionError(f"{place_text(place)} is gone, and all its calls have reported")

    def _has_report(self, reference: Any) -> bool:
        try:
            self.cluster.get([reference])
        except Exception:
            return False
        return True

    def _failed(self, walk: Walk, step: Step, place: Place, error: Exception) -> RunError:
        part = f"iteration {walk.entry.iteration + 1}" if walk.phase == "train" else "the evaluation"
        marked = plan_text(self.plan, failed=(step.phase, step.id))
        law = f"step {step.id} of {part} failed on {place_text(place)}: {sentence(step)}"
        return failure(marked, law, error)
