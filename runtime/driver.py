"""The driver hands steps to pools, and waits for what they report.

Each pool gets its steps in the order given, and runs them in it. A step is handed over as soon as its calls
are known; those of a balanced layout, say, depend on how many tokens came out. One that must wait holds up
its own pool only. From then on Ray follows the references: a call starts when its inputs are there. A call
costs milliseconds, so a worker gets steps in a row in one, where nobody waits for what the first of them
gives, and the last of them for nothing that the first does not. A move of columns goes with the step behind.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.plan import Plan, Step
from rlgraph.runtime.cluster import Cluster, Place, place_text
from rlgraph.runtime.failure import cause, culprit, failure, is_gone
from rlgraph.runtime.rounds import more
from rlgraph.runtime.rows import NotYet
from rlgraph.runtime.stream import repeated
from rlgraph.runtime.tasks import Here, Sent, Task, Trail
from rlgraph.runtime.walk import Call, Walk
from rlgraph.text import plan_text, sentence

CARRIES = ("repartition", "repeat", "select")  # kinds of steps that move columns
Watch = Callable[[Mapping[str, Step]], None]  # told which step each pool is at


@dataclass
class Begun:
    """A step that was begun: its calls, and, of those that were made, the references of what they return."""

    walk: Walk
    step: Step
    calls: list[Call]
    beside: bool = False  # whether they run beside the workers
    made: dict[Place, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A call that was made: of which worker, its share of which steps, the references of what it makes."""

    place: Place
    steps: list[tuple[Walk, Step]]
    made: list[Any]
    beside: bool = False


class Driver:
    """Steps of one or more iterations in flight: those that wait, and calls that have not reported."""

    def __init__(self, plan: Plan, cluster: Cluster, watch: Watch, logs: Path | None = None) -> None:
        """One for a run.

        Args:
            plan: what is run.
            cluster: on which.
            watch: is told where it stands.
            logs: of the run's directory, where workers note which task they are at.
        """
        self.plan, self.cluster, self.watch, self.logs = plan, cluster, watch, logs
        self.waiting: list[tuple[Walk, Step]] = []  # in the order in which each pool will get them
        self.open: list[Begun] = []  # whose calls are known and not made
        self.pending: dict[Any, Asked] = {}  # by the reference of the reports
        self.makers: dict[Any, Any] = {}  # of what they make: reference -> that of the reports
        self.given: Counter[Place] = Counter()  # tasks that each worker was given so far
        self.over: dict[Place, list[str]] = {}  # names of what was lent and nobody reads any more
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
        last, before = time.monotonic(), dict[str, Step]()
        while not walk.done:
            assert self.pending, f"steps {sorted(walk.unsubmitted)} wait for what no step makes"
            running = self._running()
            self.watch(running)
            if running != before:  # a step that begins is a sign of life, as reports are
                last, before = time.monotonic(), running
            ready, _ = self.cluster.wait([*self.pending], timeout=1.0)
            for reference in ready:
                self._collect(reference)
            if ready:
                last = time.monotonic()
                self._hand_over()
            elif (silent := time.monotonic() - last) > self.plan.schedule["timeout"]:
                where = self._first(walk)
                raise self._failed(*where, RunError(f"nothing came for {silent:.0f} s (schedule.timeout)"))

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
        self._send()

    def _more(self, walk: Walk, step: Step) -> list[tuple[Walk, Step]]:
        """Steps that come before one: those of its region's next round."""
        try:
            return more(walk, step)
        except RunError as error:
            raise self._failed(walk, step, (step.pool, 0), error) from error

    def _start(self, walk: Walk, step: Step) -> bool:
        """Take up a step, if its calls are known: they are made with those of the steps behind it, or now."""
        try:
            calls = self._calls(walk, step)
        except NotYet:
            return False
        beside = step.id in walk.beside
        if not beside and not self._goes_along(walk, calls):
            self._send()
        walk.start(step)
        self.open.append(Begun(walk, step, self._needed(walk, step, calls), beside))
        if self.cluster.inline or step.id in walk.awaited:
            self._send()
        return True

    def _goes_along(self, walk: Walk, calls: Sequence[Call]) -> bool:
        """Whether calls may be made together with the open ones, none of which starts later for that."""
        shares = self._shares()
        return all(self._follows(shares.get(call.place, []), walk, call) for call in calls)

    def _follows(self, share: Sequence[tuple[Begun, Call]], walk: Walk, call: Call) -> bool:
        """Whether a call may come last in a worker's share of the open steps."""
        if all(begun.step.kind in CARRIES for begun, _ in share):
            return True
        awaited = {maker for _, before in share for maker in self._makers(before)}
        return share[-1][0].walk is walk and self._makers(call) <= awaited

    def _makers(self, call: Call) -> set[Any]:
        """The calls that make what one is given and have not reported: the references of their reports."""
        return {self.makers[part] for part in call.parts if part in self.makers}

    def _calls(self, walk: Walk, step: Step) -> list[Call]:
        try:
            return walk.calls(step)
        except NotYet:
            if not self.open:
                raise
            self._send()  # it may read what one of them makes
            return walk.calls(step)

    def _send(self) -> None:
        """Call each worker once, for its share of all the steps that are open."""
        for place, share in self._shares().items():
            self.watch({place[0]: share[-1][0].step})  # where calls run in this process, none is pending yet
            self._call(place, share)
        for begun in self.open:
            for call in begun.calls if begun.beside else ():
                self._call(call.place, [(begun, call)], beside=True)
            begun.walk.submitted(begun.step, begun.made)
        self.open = []

    def _shares(self) -> dict[Place, list[tuple[Begun, Call]]]:
        """By worker, its calls for the steps that are open, but for what runs beside it."""
        shares: dict[Place, list[tuple[Begun, Call]]] = {}
        for begun in self.open:
            for call in begun.calls if not begun.beside else ():
                shares.setdefault(call.place, []).append((begun, call))
        return shares

    def _call(self, place: Place, share: list[tuple[Begun, Call]], beside: bool = False) -> None:
        tasks, parts = list[Task](), list[Any]()
        for begun, call in share:
            sent = [part for part in call.parts if not isinstance(part, Here)]
            numbers = map(Sent, count(len(parts)))
            given = tuple(part if isinstance(part, Here) else next(numbers) for part in call.parts)
            keeps = (*begun.walk.keeps(begun.step), *[""] * call.leaves)
            lends = (*begun.walk.lends(begun.step), *[""] * call.leaves)
            lends = lends if self.cluster.lends and not beside else ("",) * len(lends)
            tasks.append(Task(call.method, call.args, given, keeps, lends, begun.walk.drops(begun.step)))
            parts += sent
        returns = 1 + sum(task.returned for task in tasks)
        if beside:
            reports, *made = self.cluster.beside(self.plan, place, tasks, *parts, returns=returns)
        else:
            over = self.over.pop(place, [])
            reports, *made = self.cluster.call(place, "perform", tasks, over, *parts, returns=returns)
            self.given[place] += len(share)
        self.pending[reports] = Asked(place, [(begun.walk, begun.step) for begun, _ in share], made, beside)
        self.makers |= dict.fromkeys(made, reports)
        for (begun, _), task in zip(share, tasks, strict=True):
            begun.made[place], made = made[: task.returned], made[task.returned :]

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
        """The step that each pool is at: its first worker that has not reported."""
        workers_first = sorted(self.pending.values(), key=lambda asked: asked.beside)
        places = {asked.place[0]: asked.place for asked in reversed(workers_first)}
        return {pool: self._at(place)[1] for pool, place in places.items()}

    def _first(self, walk: Walk) -> tuple[Walk, Step, Place]:
        """What a walk waits for: the first of its calls, or of those that it must let pass."""
        every = [*self.pending.values()]
        first = next((asked for asked in every if asked.steps[-1][0] is walk), every[0])
        return (*(first.steps[0] if first.beside else self._at(first.place)), first.place)

    def _at(self, place: Place) -> tuple[Walk, Step]:
        """Where a worker is: one that is gone fails all its calls at once, reported or not, in any order."""
        mine = [asked for asked in self.pending.values() if asked.place == place]
        steps = [one for asked in mine if not asked.beside for one in asked.steps]
        if not steps:
            return mine[0].steps[0]
        begun = Trail(self.logs, *place).last() if self.logs else self.given[place]
        first = self.given[place] - len(steps)  # tasks that have reported
        return steps[min(max(begun - first - 1, 0), len(steps) - 1)]

    def _collect(self, reference: Any) -> None:
        asked = self.pending[reference]
        try:
            (reports,) = self.cluster.get([reference])
        except Exception as error:
            places = {pending: other.place for pending, other in self.pending.items()}
            place, first = culprit(self.cluster, places, reference, error)
            own = not is_gone(first) or (asked.beside and first is error)
            walk, step = asked.steps[getattr(cause(first), "task", -1)] if own else self._at(place)
            raise self._failed(walk, step, place, first) from error
        del self.pending[reference]
        for part in asked.made:
            del self.makers[part]
        for (walk, step), report in zip(asked.steps, reports, strict=True):
            for name, maker in walk.reported(step, asked.place, report):
                self.over.setdefault(maker, []).append(name)

    def _failed(self, walk: Walk, step: Step, place: Place, error: Exception) -> RunError:
        part = f"iteration {walk.entry.iteration + 1}" if walk.phase == "train" else "the evaluation"
        marked = plan_text(self.plan, failed=(step.phase, step.id))
        law = f"step {step.id} of {part} failed on {place_text(place)}: {sentence(step)}"
        return failure(marked, law, error)
