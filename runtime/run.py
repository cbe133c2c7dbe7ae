"""``rlgraph run``: compile, check what the graph needs, and train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from rlgraph.errors import RunError, fail
from rlgraph.plan import Plan, Target
from rlgraph.planfile import plan_given
from rlgraph.runtime.cluster import Cluster, InlineCluster, RayCluster
from rlgraph.runtime.failure import LostError, out_of_room
from rlgraph.runtime.preflight import preflight
from rlgraph.runtime.progress import Progress
from rlgraph.runtime.rundir import RunDir
from rlgraph.runtime.trackers import installed
from rlgraph.runtime.training import Training
from rlgraph.text import show_text


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
    target: Target | None = None,
    track: Sequence[str] = (),
    profile: Iterable[int] = (),
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
        inline: everything in this process, each pool on one device, without Ray.
        target: a cluster to plan for, so that engines leave their devices where all would not fit.
        track: services that take the metrics too: ``wandb``, ``mlflow``.
        profile: iterations, counted from 1, of which every worker writes a trace.

    Raises:
        GraphError: the graph, or a file that it names, is wrong.
        RunError: the run could not start, a saved plan is not what its graph gives now, a step failed, or
            workers were lost more often than ``schedule.restarts`` allows.
    """
    installed(track)
    tree, plan = plan_given(graph, overrides, devices, inline, target)
    if inline and max(plan.pools.values()) > 1:
        pool = next(pool for pool, devices in plan.pools.items() if devices > 1)
        mark = tree.at(("pools", pool, "devices")).mark
        which = f"pool {pool} " if len(plan.pools) > 1 else ""
        remedy = "leave out `devices`, or --inline"
        raise fail("inline", f"--inline runs {which}on one device", mark, remedy=remedy)
    preflight(plan, tree)
    path = run_dir or Path("runs") / plan.graph
    folder = RunDir.existing(path) if resume else RunDir.fresh(run_dir, plan.graph)
    if resume:
        folder.check_same(plan)
    folder.describe(plan, show_text(tree))
    folder.track, folder.profile = track, frozenset(profile)
    total = plan.iterations if steps is None else steps
    with Progress(plan, total, folder.path) as progress:
        _train(Attempt(plan, folder, progress, total, address, inline), resume)
    progress.farewell()
    return folder.path


@dataclass(frozen=True)
class Attempt:
    """What a run needs each time that its workers start."""

    plan: Plan
    folder: RunDir
    progress: Progress
    total: int
    address: str | None
    inline: bool

    def run(self, resume: bool) -> None:
        """Start the workers, train from the last checkpoint or from the start, and end them.

        Raises:
            LostError: a worker or its host is gone.
            RunError: anything else that a user can mend, a full disk among it.
        """
        try:
            cluster = self._cluster()
            try:
                Training(self.plan, cluster, self.folder, self.progress, self.total).run(resume)
            finally:
                cluster.close()
                self.folder.close()
        except OSError as error:
            if law := out_of_room(error):
                raise RunError(f"{self.folder.path}: {law}".rstrip()) from error
            raise

    def _cluster(self) -> Cluster:
        self.progress.say("starting workers")
        if self.inline:
            return InlineCluster(self.plan.pools)
        logs, timeout = self.folder.path / "logs", self.plan.schedule["timeout"]
        return RayCluster(self.plan.pools, torch.cuda.is_available(), self.address, logs, timeout)


def _train(attempt: Attempt, resume: bool) -> None:
    """Train; where a worker is lost, again from the last checkpoint, as often as the schedule allows."""
    allowed = attempt.plan.schedule["restarts"]
    for restart in count(1):
        try:
            attempt.run(resume)
            return
        except LostError as error:
            if restart > allowed:
                raise RunError(f"{error}\n{_advice(attempt, allowed)}") from error
            attempt.folder.restarted(restart, allowed, error.brief)
            attempt.progress.restarting(restart, allowed, error.brief)
        resume = True


def _advice(attempt: Attempt, restarts: int) -> str:
    used = f"  {restarts} restarts were used up (schedule.restarts)\n" if restarts else ""
    if attempt.folder.saved() < 0:
        return f"{used}  there is no checkpoint yet: start anew, with schedule.restarts for another try"
    last = f"  the last checkpoint is that after iteration {attempt.folder.saved()}"
    return f"{used}{last}: continue with --resume --run-dir {attempt.folder.path}"
