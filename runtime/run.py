"""``rlgraph run``: compile, check what the graph needs, and train."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlgraph.errors import RunError, fail
from rlgraph.plan import Plan, Step
from rlgraph.planfile import plan_given
from rlgraph.runtime.cluster import Cluster, InlineCluster, RayCluster
from rlgraph.runtime.driver import Ran, State, Walk
from rlgraph.runtime.preflight import preflight
from rlgraph.runtime.progress import Progress
from rlgraph.runtime.rundir import RunDir
from rlgraph.runtime.worker import Report
from rlgraph.text import show_text

SAMPLES = 32  # rows written to a samples file


def run_graph(
    graph: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    *,
    steps: int | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    address: str | None = None,
    inline: bool = False,
) -> Path:
    """Compile a graph and train; the run directory is returned.

    Args:
        graph: a path, the name of a shipped graph, or a saved plan (``rlgraph plan GRAPH -o plan.json``),
            which goes with no overrides and devices: what it was made with is settled.
        overrides: ``key=value`` settings.
        devices: how many devices ``auto`` stands for; those of this machine unless given.
        steps: stop after this many iterations in all, instead of ``schedule.iterations``.
        run_dir: where the run is kept; ``runs/<graph>`` unless given.
        resume: continue the run in ``run_dir`` from its last checkpoint.
        address: of a Ray cluster to join.
        inline: everything in this process, on one device, without Ray.

    Raises:
        GraphError: the graph, or a file that it names, is wrong.
        RunError: the run could not start, a saved plan is not what its graph gives now, or a step failed.
    """
    tree, plan = plan_given(graph, overrides, devices, inline)
    if inline and max(plan.pools.values()) > 1:
        mark = tree.at(("pools", *plan.pools, "devices")).mark
        raise fail("inline", "--inline runs on one device", mark, remedy="leave out `devices`, or --inline")
    preflight(plan, tree)
    path = run_dir or Path("runs") / plan.graph
    folder = RunDir.existing(path) if resume else RunDir.fresh(run_dir, plan.graph)
    if resume:
        folder.check_same(plan)
    folder.describe(plan, show_text(tree))
    total = plan.iterations if steps is None else steps
    with Progress(plan, total, folder.path) as progress:
        cluster = _cluster(plan, folder, address, inline, progress)
        try:
            Training(plan, cluster, folder, progress, total).run(resume)
        finally:
            cluster.close()
            folder.close()
    progress.farewell()
    return folder.path


def _cluster(plan: Plan, folder: RunDir, address: str | None, inline: bool, progress: Progress) -> Cluster:
    ((_, devices),) = plan.pools.items()
    progress.say("starting workers")
    if inline:
        return InlineCluster()
    return RayCluster(
        devices, torch.cuda.is_available(), address, folder.path / "logs", plan.schedule["timeout"]
    )


class Training:
    """The loop over iterations."""

    def __init__(self, plan: Plan, cluster: Cluster, folder: RunDir, progress: Progress, total: int) -> None:
        self.plan, self.cluster, self.folder = plan, cluster, folder
        self.progress, self.total = progress, total
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
            values = self._iteration()
            if self.plan.eval_steps and self._is_due(self.plan.eval_every, self.state.iteration):
                values |= self._evaluate()
            self.folder.metrics(values)
            self.progress.iteration(values)
            if self._is_due(self.plan.schedule["save_every"], self.state.iteration):
                self._save()

    def _is_due(self, every: int, iteration: int) -> bool:
        """Whether what happens every so often, and at the end, happens after this many iterations."""
        return iteration == self.total or bool(every and iteration % every == 0)

    def _setup(self) -> None:
        (place,) = self.cluster.get(self.cluster.call(0, "place"))
        (port,) = self.cluster.get(self.cluster.call(0, "free_port"))
        self.progress.say("loading models")
        self._all("setup", self.plan, rank=True, meeting=f"tcp://{place[2]}:{port}")

    def _all(self, method: str, *args: Any, rank: bool = False, meeting: str = "") -> list[Report]:
        """Call a method on every worker and wait; the first failure is raised."""
        size = self.cluster.size
        pending = [
            self.cluster.call(device, method, *args, *((device, size, meeting) if rank else ()))[0]
            for device in range(size)
        ]
        results, limit = [], self.plan.schedule["timeout"]
        while pending:
            ready, pending = self.cluster.wait(pending, timeout=limit)
            if not ready:
                raise RunError(f"`{method}` on all workers took over {limit:.0f} s (schedule.timeout)")
            results += self.cluster.get(ready)
        return results

    def _iteration(self) -> dict[str, Any]:
        start = time.time()
        sampled = self._is_due(self.plan.schedule["save_every"], self.state.iteration + 1)
        walk, ran = self._walk("train", self.plan.steps, sampled)
        for step in self.plan.steps:
            if step.kind == "run" and not step.reads:
                taken = self.state.positions.get(step.node, 0)
                self.state.positions[step.node] = taken + walk.rows[walk.columns[step.writes[0]].domain]
            for model in step.models if step.updates else ():
                self.state.versions[model] += 1
        self.state.iteration += 1
        if sampled:
            self._samples(walk, "train")
        return {
            "step": self.state.iteration,
            **_metrics(ran),
            "time/step": time.time() - start,
            **_times(ran),
        }

    def _walk(self, phase: str, steps: Sequence[Step], sampled: bool) -> tuple[Walk, list[Ran]]:
        walk = Walk(self.plan, self.cluster, self.state, phase, self.progress.step)
        wanted = _sample_columns(self.plan, phase) if sampled else []
        ran = walk.run(steps, keep=lambda column: column in wanted)
        self.folder.timeline(ran, self.state.iteration + (phase == "train"))
        return walk, ran

    def _evaluate(self) -> dict[str, float]:
        start = time.time()
        walk, _ = self._walk("eval", self.plan.eval_steps, sampled=True)
        values = {}
        for metric, column in self.plan.report.items():
            parts = [ref for ref in walk.refs[column] if ref is not None]
            ((total, count),) = self.cluster.get(self.cluster.call(0, "mean", *parts))
            values[f"eval/{metric}"] = total / count if count else float("nan")
        self._samples(walk, "eval")
        self.progress.evaluation(self.state.iteration, values)
        return {**values, "time/eval": time.time() - start}

    def _samples(self, walk: Walk, phase: str) -> None:
        names = _sample_columns(self.plan, phase)
        if names and all(walk.kept[name][0] is not None for name in names):
            path = self.folder.samples(self.state.iteration, phase)
            parts = [walk.kept[name][0] for name in names]
            labels = [name.partition("*")[0] for name in names]
            self.cluster.get(self.cluster.call(0, "write_samples", path, labels, SAMPLES, *parts))

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
        progress.say("stopping after this iteration; Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _metrics(ran: Sequence[Ran]) -> dict[str, float]:
    """Means over rows and ranks of what the ops recorded; a count of 0 marks a sum."""
    found: dict[str, tuple[float, float]] = {}
    for item in ran:
        for report in item.reports.values():
            for name, (total, count) in report.metrics.items():
                before = found.get(name, (0.0, 0.0))
                found[name] = before[0] + total, before[1] + count
    return {name: total / count if count else total for name, (total, count) in found.items()}


def _times(ran: Sequence[Ran]) -> dict[str, float]:
    """Seconds of each step, from the first device's start to the last one's end."""
    found = {}
    for item in ran:
        reports = item.reports.values()
        found[f"time/{item.step.node}"] = max(r.end for r in reports) - min(r.start for r in reports)
    return found


def _sample_columns(plan: Plan, phase: str) -> list[str]:
    """Columns that tell what the model wrote, of one domain and layout: text, and a number a sample."""
    columns = plan.columns[phase]
    made = next((column for name, column in columns.items() if name == "responses"), None)
    if made is None:
        return []
    kinds = ("text[samples]", "float32[samples]")
    same = [n for n, c in columns.items() if (c.domain, c.layout) == (made.domain, made.layout)]
    return ["tokens", *(n for n in same if columns[n].type in kinds)] if "tokens" in same else []
