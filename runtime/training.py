"""The loop over iterations: stretches of them, and what happens between two: evaluations and checkpoints."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlgraph.errors import RunError
from rlgraph.plan import Plan
from rlgraph.runtime.cluster import Cluster, Place, place_text
from rlgraph.runtime.driver import Driver, reason
from rlgraph.runtime.pipeline import State, stretch
from rlgraph.runtime.progress import Progress
from rlgraph.runtime.rundir import RunDir
from rlgraph.runtime.walk import Entry, Ran, Walk

SAMPLES = 32  # rows written to a samples file


class Training:
    """A run from its workers' start to the exported models."""

    def __init__(self, plan: Plan, cluster: Cluster, folder: RunDir, progress: Progress, total: int) -> None:
        self.plan, self.cluster, self.folder = plan, cluster, folder
        self.progress, self.total = progress, total
        self.driver = Driver(plan, cluster, progress.step)
        self.state = State(versions={name: 0 for name, model in plan.models.items() if model.train})

    def run(self, resume: bool) -> None:
        """From the start, or from the last checkpoint, to the last iteration; then export the models."""
        self._setup()
        if resume:
            self._restore()
        with _stop_on_interrupt(self.progress) as stop:
            self._iterate(stop)
        if self._saved() < self.state.iteration:
            self._save()
        if stop:
            raise RunError(
                f"stopped after iteration {self.state.iteration}\n"
                f"  continue with --resume --run-dir {self.folder.path}"
            )
        self.progress.say("writing the models")
        self._all("export", str((self.folder.path / "models").resolve()))

    def _iterate(self, stop: list[int]) -> None:
        if self.state.iteration == 0 and self.plan.eval_steps:
            self.folder.metrics({"step": 0, **self._evaluate()})
        while self.state.iteration < self.total and not stop:
            self._stretch(stop)

    def _stretch(self, stop: list[int]) -> None:
        """The iterations up to the next evaluation or checkpoint; then that, with nothing in flight."""
        since = time.time()
        for walk in stretch(self.plan, self.driver, self.state, self._boundary(), stop, self._kept):
            values, since = self._measured(walk, since), time.time()
            if self.plan.eval_steps and self._is_due(self.plan.eval_every, self.state.iteration):
                values |= self._evaluate()
            self.folder.metrics(values)
            self.progress.iteration(values)
            if self._is_due(self.plan.schedule["save_every"], self.state.iteration):
                self._save()

    def _boundary(self) -> int:
        """The next iteration after which something else comes."""
        rhythms = [self.plan.schedule["save_every"], self.plan.eval_every if self.plan.eval_steps else 0]
        later = range(self.state.iteration + 1, self.total + 1)
        return next(i for i in later if any(self._is_due(every, i) for every in rhythms))

    def _is_due(self, every: int, iteration: int) -> bool:
        """Whether what happens every so often, and at the end, happens after this many iterations."""
        return iteration == self.total or bool(every and iteration % every == 0)

    def _kept(self, iteration: int) -> frozenset[str]:
        """The columns that an iteration, counted from 0, keeps for its samples file."""
        wanted = self._is_due(self.plan.schedule["save_every"], iteration + 1)
        return frozenset(_sample_columns(self.plan, "train") if wanted else ())

    def _setup(self) -> None:
        (_, _, address), port = (self._one(self.cluster.places[0], name) for name in ("place", "free_port"))
        self.progress.say("loading models")
        self._all("setup", self.plan, meeting=f"tcp://{address}:{port}")

    def _all(self, method: str, *args: Any, meeting: str = "") -> list[Any]:
        """Call a method on every worker and wait; the first failure is raised."""
        pending = {
            self.cluster.call(place, method, *args, *((*place, meeting) if meeting else ()))[0]: place
            for place in self.cluster.places
        }
        return self._results(method, pending)

    def _one(self, place: Place, method: str, *args: Any) -> Any:
        """Call a method on one worker and wait."""
        (result,) = self._results(method, {self.cluster.call(place, method, *args)[0]: place})
        return result

    def _results(self, method: str, pending: dict[Any, Place]) -> list[Any]:
        results, limit = [], self.plan.schedule["timeout"]
        while pending:
            ready, _ = self.cluster.wait([*pending], timeout=limit)
            if not ready:
                late = ", ".join(map(place_text, pending.values()))
                raise RunError(f"`{method}` on {late} took over {limit:.0f} s (schedule.timeout)")
            for reference in ready:
                results.append(self._result(method, reference, place_text(pending.pop(reference))))
        return results

    def _result(self, method: str, reference: Any, where: str) -> Any:
        try:
            (result,) = self.cluster.get([reference])
        except Exception as error:
            raise RunError(f"`{method}` failed on {where}\n  {reason(error)}") from error
        return result

    def _measured(self, walk: Walk, since: float) -> dict[str, Any]:
        """The metrics line of an iteration; its timeline and samples are written on the way."""
        ran = walk.ran
        self.folder.timeline(ran, self.state.iteration)
        if walk.keep:
            self._samples(walk)
        values: dict[str, Any] = {"step": self.state.iteration, **_metrics(ran)}
        return {**values, "time/step": time.time() - since, **_times(ran)}

    def _evaluate(self) -> dict[str, float]:
        start = time.time()
        columns = frozenset(_sample_columns(self.plan, "eval"))
        entry = Entry(self.state.iteration, self.state.versions)
        walk = Walk(self.plan, "eval", entry, self.state.positions, keep=columns)
        self.driver.submit((walk, step) for step in self.plan.eval_steps)
        self.driver.finish(walk)
        self.folder.timeline(walk.ran, self.state.iteration)
        values = {}
        for metric, column in self.plan.report.items():
            parts = [ref for ref in walk.refs[column] if ref is not None]
            total, count = self._one((walk.pools[column], 0), "mean", *parts)
            values[f"eval/{metric}"] = total / count if count else float("nan")
        self._samples(walk)
        self.progress.evaluation(self.state.iteration, values)
        return {**values, "time/eval": time.time() - start}

    def _samples(self, walk: Walk) -> None:
        names = _sample_columns(self.plan, walk.phase)
        if names and all(walk.refs[name][0] is not None for name in names):
            path = self.folder.samples(self.state.iteration, walk.phase)
            parts = [walk.refs[name][0] for name in names]
            labels = [name.partition("*")[0] for name in names]
            self._one((walk.pools[names[0]], 0), "write_samples", path, labels, SAMPLES, *parts)

    def _save(self) -> None:
        self.progress.say("saving a checkpoint")
        folder = self.folder.begin_checkpoint()
        self._all("save", str(folder))
        self.folder.commit_checkpoint(folder, self.state, self.plan.schedule["keep"])

    def _saved(self) -> int:
        """The iteration of the last checkpoint, -1 without one."""
        found = self.folder.checkpoints()
        return int(found[-1].name.removeprefix("step-")) if found else -1

    def _restore(self) -> None:
        state, folder = self.folder.restore()
        if folder:
            self.state = state
            self._all("load", str(folder), state.versions)
            self.progress.resumed(state.iteration)


@contextmanager
def _stop_on_interrupt(progress: Progress) -> Iterator[list[int]]:
    """A list that the first Ctrl-C puts an item into; the second is raised at once."""
    stop: list[int] = []

    def interrupted(number: int, frame: Any) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(number)
        progress.say("stopping after what has begun; Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _metrics(ran: Sequence[Ran]) -> dict[str, float]:
    """Means over rows and ranks of what the ops recorded; a count of 0 marks a sum.

    A mean that several nodes record under one name is the first node's, and ``NODE/name`` that of each other.
    """
    found: dict[str, tuple[float, float]] = {}
    owners: dict[str, str] = {}
    for item in ran:
        node = item.step.node
        for report in item.reports.values():
            for recorded, (total, count) in report.metrics.items():
                own = not count or owners.setdefault(recorded, node) == node
                name = recorded if own else f"{node}/{recorded}"
                before = found.get(name, (0.0, 0.0))
                found[name] = before[0] + total, before[1] + count
    return {name: total / count if count else total for name, (total, count) in found.items()}


def _times(ran: Sequence[Ran]) -> dict[str, float]:
    """Seconds of each step, from the first device's start to the last one's end.

    Of a sync between pools from the last one's start: the pool that is there first waits for the other.
    """
    found = {}
    for item in ran:
        starts = [report.start for report in item.reports.values()]
        start = max(starts) if item.step.source else min(starts)
        found[f"time/{item.step.node}"] = max(report.end for report in item.reports.values()) - start
    return found


def _sample_columns(plan: Plan, phase: str) -> list[str]:
    """Columns that tell what the model wrote, on the same devices: text, and a number a sample."""
    columns = plan.columns[phase]
    steps = plan.steps if phase == "train" else plan.eval_steps
    pools = {column: step.pool for step in steps for column in step.writes}
    if "responses" not in columns:
        return []
    lies = {name: (column.domain, column.layout, pools[name]) for name, column in columns.items()}
    same = [name for name in columns if lies[name] == lies["responses"]]
    kinds = ("text[samples]", "float32[samples]")
    return ["tokens", *(n for n in same if columns[n].type in kinds)] if "tokens" in same else []
