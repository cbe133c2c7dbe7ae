"""``rlgraph run``: compile, check what the graph needs, and train."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from rlgraph.compiler import Compilation
from rlgraph.costs.detect import local_device
from rlgraph.errors import RunError
from rlgraph.files import read_json
from rlgraph.ir.plan import Plan, Target
from rlgraph.nodes.support.data_file import local_path
from rlgraph.passes.lower import in_one_process
from rlgraph.planning.device_groups import together, whole_hosts
from rlgraph.reports.plan_file import check_inline, compilation_of, is_plan
from rlgraph.request import PlanRequest
from rlgraph.runtime.cluster.cluster import InlineCluster, RayCluster
from rlgraph.runtime.cluster.devices import Devices, agree, of_machine, of_ray
from rlgraph.runtime.cluster.failures import LostError, of_files
from rlgraph.runtime.cluster.interface import WorkerCluster
from rlgraph.runtime.messages.log_level import LEVEL
from rlgraph.runtime.preflight import LookedAt, preflight
from rlgraph.runtime.rundir.changes import changes
from rlgraph.runtime.rundir.endpoint import MetricsEndpoint
from rlgraph.runtime.rundir.going_back import go_back
from rlgraph.runtime.rundir.progress import Progress
from rlgraph.runtime.rundir.rundir import RunDir
from rlgraph.runtime.rundir.trackers import Trackers, make_of
from rlgraph.runtime.signals import StopSignals
from rlgraph.runtime.training import TrainingRun
from rlgraph.syntax.source import NOWHERE, Tree
from rlgraph.syntax.yaml_text import show_text
from rlgraph.variables import referred, with_values


def run_graph(
    graph: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    *,
    steps: int | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    resume_from: str | None = None,
    time_limit: float | None = None,
    address: str | None = None,
    inline: bool = False,
    target: Target | None = None,
    track: Sequence[str] = (),
    metrics_port: str | None = None,
    profile: Iterable[int] = (),
    strict: bool = False,
    log_level: str | None = None,
) -> Path:
    """Compile a graph and train; the run directory is returned.

    Args:
        graph: a path, the name of a shipped graph, or a saved plan (``rlgraph plan GRAPH -o plan.json``),
            which goes with no overrides and devices: what it was made with is settled.
        overrides: ``key=value`` settings.
        devices: how many devices ``auto`` stands for; those of the Ray cluster, or of this machine, unless
            given.
        steps: stop after this many iterations in all, instead of ``schedule.iterations``.
        run_dir: where the run is kept; ``runs/<graph>`` unless given.
        resume: continue the run in ``run_dir`` from its last checkpoint.
        resume_from: continue it from this one, as ``step-000100`` or ``best``; what came after it is set
            aside.
        time_limit: seconds after which no iteration begins; the run ends then, to be resumed.
        address: of a Ray cluster to join.
        inline: everything in this process, each pool on one device, without Ray.
        target: a cluster to plan for, so that engines leave their devices where all would not fit. On GPUs it
            is by default the cluster of those that there are.
        track: what takes metrics and samples too: ``wandb``, ``mlflow``, or ``my_tracker.py:Name``.
        metrics_port: where Prometheus can ask for the newest metrics, ``PORT`` or ``HOST:PORT``.
        profile: iterations, counted from 1, of which every worker writes a trace.
        strict: take warnings of the graph for errors.
        log_level: debug, info, warning or error: what the run's processes log, from it on.

    Raises:
        GraphError: the graph, or a file that it names, is wrong.
        RunError: the run could not start, or can't go on with settings that have changed, a saved plan is
            not what its graph gives now, a plan is for other devices than there are, a step failed, or
            workers were lost more often than ``schedule.restarts`` allows.
        StoppedError: a signal or the time limit has ended it, with a checkpoint.
    """
    trackers = make_of(track)
    if log_level:
        os.environ[LEVEL] = log_level
    resume = resume or resume_from is not None
    there = devices_there(inline, address)
    request = PlanRequest(graph, overrides, devices, target)
    plan, tree, looked_at = ready(request, there, strict)
    path = run_dir or Path("runs") / plan.graph
    try:
        with (
            # first: where nothing can listen, no run directory is left
            closing(MetricsEndpoint(metrics_port, plan.graph)) if metrics_port else nullcontext() as served,
            RunDir.existing(path) if resume else RunDir.fresh(run_dir, plan.graph) as folder,
        ):
            path = folder.path
            notes = _go_on(folder, plan, resume_from) if resume else []
            folder.describe(plan, show_text(tree.written()))
            total = plan.iterations if steps is None else steps
            with (
                Progress(plan, total, folder.path) as progress,
                StopSignals(partial(progress.say, stays=True), time_limit) as signals,
            ):
                notes += [f"metrics for Prometheus: {served.url}"] if served else []
                lasting = [served] if served else []
                folder.trackers = Trackers(path, plan.graph, trackers, lasting, progress.note)
                folder.profile = frozenset(profile)
                for note in (*(warning.render() for warning in looked_at.warnings), *notes):
                    progress.note(note)
                rows = looked_at.rows
                _train(Attempt(plan, folder, progress, total, address, there, signals, rows), resume)
            progress.farewell()
            return folder.path
    except OSError as error:
        if law := of_files(error, path):
            raise RunError(law) from error
        raise


def devices_there(inline: bool, address: str | None) -> Devices | None:
    """Return the devices of a Ray cluster or of this machine; None: all is to be in this process."""
    return None if inline else of_ray(address) if address else of_machine()


def ready(request: PlanRequest, there: Devices | None, strict: bool = False) -> tuple[Plan, Tree, LookedAt]:
    """Return a plan whose files have been looked at, its composed graph, and what they say, with the warnings
    of both.

    Models at URLs are copied here first: their configurations say how large they are. ``there`` are the
    devices that the run may have; None: this process alone.
    """
    if there:
        request = replace(request, here=there.cluster, device=there.kind)
    else:
        request = replace(request, device=local_device())
    compilation = compilation_of(request, inline=there is None)
    if not is_plan(request.graph):
        _copy_models(compilation.tree)
    plan = compilation.plan
    if there:
        agree(plan, there)
    else:
        check_inline(compilation)
        plan = in_one_process(plan)
    warnings = compilation.warn(strict)
    looked_at = preflight(plan, compilation.tree, strict)
    looked_at = replace(looked_at, warnings=[*warnings, *looked_at.warnings])
    if looked_at.iterations is not None:
        plan = _as_long(plan, looked_at.iterations, there)
    return plan, compilation.tree, looked_at


def _copy_models(tree: Tree) -> None:
    """Copy the models of a graph that are at URLs to this machine."""
    models = tree.get("models") or Tree({}, NOWHERE)
    for model in models.items.values():
        if path := model.get("path"):
            local_path(str(with_values(path.value)))


def _go_on(folder: RunDir, plan: Plan, name: str | None) -> list[str]:
    """Make a run's directory ready to go on, from its last checkpoint or an earlier one; return what to say.

    Raises:
        RunError: there is no such checkpoint, or settings have changed with which it can't go on.
    """
    changed = changes(folder.path, read_json(folder.path / "plan.json"), plan)
    aside = go_back(folder, name) if name else None
    folder.resumed(changed)
    kept = [f"what came after {name} is in {aside}: rlgraph report {aside}"] if aside else []
    return [*kept, *(f"changed from here on: {change}" for change in changed)]


def _as_long(plan: Plan, iterations: int, there: Devices | None) -> Plan:
    """Return the plan of so many iterations in place of epochs, once the data have said how many they are."""
    assert plan.origin
    request = PlanRequest.again(plan.origin, plan.device, there.cluster if there else None)
    longer = Compilation(
        request.with_overrides("schedule.epochs=null", f"schedule.iterations={iterations}")
    ).plan
    return longer if there else in_one_process(longer)


@dataclass(frozen=True)
class Attempt:
    """The inputs of a run each time that its workers start."""

    plan: Plan
    folder: RunDir
    progress: Progress
    total: int
    address: str | None
    devices: Devices | None  # None: everything is in this process
    signals: StopSignals
    rows: Mapping[str, int]  # source -> its rows, where they are counted before the run

    def run(self, resume: bool) -> None:
        """Start the workers, train from the last checkpoint or from the start, and end them.

        Raises:
            LostError: a worker or its host is gone.
            RunError: anything else that a user can mend, a full disk among it.
        """
        with self.training() as run:
            run.run(resume)

    @contextmanager
    def training(self) -> Iterator[TrainingRun]:
        """Start the workers for a block, and end them."""
        cluster = self._cluster()
        try:
            yield TrainingRun(
                self.plan, cluster, self.folder, self.progress, self.total, self.signals, self.rows
            )
        finally:
            cluster.close()
            self.folder.close()

    def _cluster(self) -> WorkerCluster:
        self.progress.say("starting workers")
        if self.devices is None:
            return InlineCluster(self.plan.pools)
        plan, gpus, logs = self.plan, self.devices.kind == "cuda", self.folder.path / "logs"
        env = with_values(plan.schedule.runtime_env, referred(plan))
        where = plan.pools, gpus, self.address, logs
        cluster = RayCluster(*where, plan.schedule.timeout, together(plan), whole_hosts(plan), env)
        for note in cluster.notes:
            self.progress.note(note)
        return cluster


def _train(attempt: Attempt, resume: bool) -> None:
    """Train; where a worker is lost, again from the last checkpoint, as often as the schedule allows."""
    allowed = attempt.plan.schedule.restarts
    try:
        for restart in count(1):
            try:
                attempt.run(resume)
                return
            except LostError as error:
                if restart > allowed or attempt.signals.reasons:
                    raise RunError(f"{error}\n{_advice(attempt, min(restart - 1, allowed))}") from error
                attempt.folder.restarted(restart, allowed, error.brief)
                attempt.progress.restarting(restart, allowed, error.brief)
            resume = True
    except KeyboardInterrupt as stopped:
        raise RunError(f"stopped at once\n{_advice(attempt, 0)}") from stopped


def _advice(attempt: Attempt, restarts: int) -> str:
    used = f"  {restarts} restarts were used up (schedule.restarts)\n" if restarts else ""
    saved, remedy = attempt.folder.saved(), f"continue with --resume --run-dir {attempt.folder.path}"
    if saved < 0:
        return f"{used}  there is no checkpoint yet: {remedy}"
    return f"{used}  the last checkpoint is that after iteration {saved}: {remedy}"
