"""``rlgraph run``: compile, check what the graph needs, and train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlgraph.errors import fail
from rlgraph.plan import Plan, Target
from rlgraph.planfile import plan_given
from rlgraph.runtime.cluster import Cluster, InlineCluster, RayCluster
from rlgraph.runtime.preflight import preflight
from rlgraph.runtime.progress import Progress
from rlgraph.runtime.rundir import RunDir
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

    Raises:
        GraphError: the graph, or a file that it names, is wrong.
        RunError: the run could not start, a saved plan is not what its graph gives now, or a step failed.
    """
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
    progress.say("starting workers")
    if inline:
        return InlineCluster(plan.pools)
    logs, timeout = folder.path / "logs", plan.schedule["timeout"]
    return RayCluster(plan.pools, torch.cuda.is_available(), address, logs, timeout)
