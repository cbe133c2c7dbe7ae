"""``rlgraph run``: compile, check what the graph needs, and train."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
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
from rlgraph.runtime.preflight import Inspection, preflight
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
    available = available_devices(inline, address)

    # 1. Compile, and check the files that the plan names.
    request = PlanRequest(graph, overrides, devices, target)
    plan, tree, inspection = ready(request, available, strict)
    total = plan.iterations if steps is None else steps
    path = run_dir or Path("runs") / plan.graph
    try:
        with (
            # the endpoint comes first: where nothing can listen, no run directory is left
            _endpoint(metrics_port, plan) as endpoint,
            RunDir.existing(path) if resume else RunDir.fresh(run_dir, plan.graph) as folder,
        ):
            # 2. Prepare the run directory.
            path = folder.path
            notes = [warning.render() for warning in inspection.warnings]
            if resume:
                notes += _prepare_resume(folder, plan, resume_from)
            folder.describe(plan, show_text(tree.written()))

            # 3. Train.
            with (
                Progress(plan, total, folder.path) as progress,
                StopSignals(partial(progress.say, stays=True), time_limit) as signals,
            ):
                lasting_trackers = []
                if endpoint:
                    lasting_trackers.append(endpoint)
                    notes.append(f"metrics for Prometheus: {endpoint.url}")
                folder.trackers = Trackers(path, plan.graph, trackers, lasting_trackers, progress.note)
                folder.profile = frozenset(profile)
                for note in notes:
                    progress.note(note)
                rows = inspection.rows
                attempt = Attempt(plan, folder, progress, total, address, available, signals, rows)
                _train(attempt, resume)
            progress.farewell()
            return folder.path
    except OSError as error:
        law = of_files(error, path)
        if law:
            raise RunError(law) from error
        raise


@contextmanager
def _endpoint(port: str | None, plan: Plan) -> Iterator[MetricsEndpoint | None]:
    """Let Prometheus ask for metrics during a block, where the user gave a port for it."""
    if not port:
        yield None
        return
    with closing(MetricsEndpoint(port, plan.graph)) as endpoint:
        yield endpoint


def available_devices(inline: bool, address: str | None) -> Devices | None:
    """Return the devices of a Ray cluster or of this machine; None: all is to be in this process."""
    if inline:
        return None
    return of_ray(address) if address else of_machine()


def ready(
    request: PlanRequest, available: Devices | None, strict: bool = False
) -> tuple[Plan, Tree, Inspection]:
    """Compile a graph, and check the files that its plan names.

    Models at URLs are copied to this machine, since their configurations say how large they are.

    Args:
        request: what to compile.
        available: the devices that the run may have; None: this process alone.
        strict: whether warnings are errors.

    Returns:
        the plan, the composed graph, and what the files say, with the warnings of both.
    """
    # 1. Compile for the devices that there are.
    if available:
        request = replace(request, here=available.cluster, device=available.kind)
    else:
        request = replace(request, device=local_device())
    compilation = compilation_of(request, inline=available is None)
    if not is_plan(request.graph):
        _copy_models(compilation.tree)
    plan = compilation.plan
    if available:
        agree(plan, available)
    else:
        check_inline(compilation)
        plan = in_one_process(plan)

    # 2. Check its files; where the run is given in epochs, only they say how many iterations these are.
    warnings = compilation.warn(strict)
    inspection = preflight(plan, compilation.tree, strict)
    inspection = replace(inspection, warnings=[*warnings, *inspection.warnings])
    if inspection.iterations is not None:
        plan = _with_iterations(plan, inspection.iterations, available)
    return plan, compilation.tree, inspection


def _copy_models(tree: Tree) -> None:
    """Copy the models of a graph that are at URLs to this machine."""
    models = tree.get("models") or Tree({}, NOWHERE)
    for model in models.items.values():
        path = model.get("path")
        if path:
            local_path(str(with_values(path.value)))


def _prepare_resume(folder: RunDir, plan: Plan, name: str | None) -> list[str]:
    """Make a run's directory ready to go on from its last checkpoint, or the named one; return notes.

    Raises:
        RunError: there is no such checkpoint, or settings have changed with which it can't go on.
    """
    changed = changes(folder.path, read_json(folder.path / "plan.json"), plan)
    notes = []
    if name:
        aside = go_back(folder, name)
        if aside:
            notes.append(f"what came after {name} is in {aside}: rlgraph report {aside}")
    folder.resumed(changed)
    notes += [f"changed from here on: {change}" for change in changed]
    return notes


def _with_iterations(plan: Plan, iterations: int, available: Devices | None) -> Plan:
    """Return the plan of so many iterations in place of epochs, once the data have said how many they are."""
    assert plan.origin
    cluster = available.cluster if available else None
    request = PlanRequest.again(plan.origin, plan.device, cluster)
    request = request.with_overrides("schedule.epochs=null", f"schedule.iterations={iterations}")
    plan = Compilation(request).plan
    return plan if available else in_one_process(plan)


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
        plan = self.plan
        cluster = RayCluster(
            plan.pools,
            self.devices.kind == "cuda",
            self.address,
            self.folder.path / "logs",
            plan.schedule.timeout,
            together(plan),
            whole_hosts(plan),
            with_values(plan.schedule.runtime_env, referred(plan)),
        )
        for note in cluster.notes:
            self.progress.note(note)
        return cluster


def _train(attempt: Attempt, resume: bool) -> None:
    """Train; where a worker is lost, go on from the last checkpoint, as often as the schedule allows."""
    allowed = attempt.plan.schedule.restarts
    try:
        for restart in count(1):
            try:
                attempt.run(resume)
                return
            except LostError as error:
                if restart > allowed or attempt.signals.reasons:
                    used_up = min(restart - 1, allowed)
                    raise RunError(f"{error}\n{_advice(attempt, used_up)}") from error
                attempt.folder.restarted(restart, allowed, error.brief)
                attempt.progress.restarting(restart, allowed, error.brief)
            resume = True
    except KeyboardInterrupt as stopped:
        raise RunError(f"stopped at once\n{_advice(attempt, 0)}") from stopped


def _advice(attempt: Attempt, restarts: int) -> str:
    """Return how to continue, behind how many ``restarts`` were used up."""
    lines = []
    if restarts:
        lines.append(f"  {restarts} restarts were used up (schedule.restarts)")
    saved = attempt.folder.saved()
    remedy = f"continue with --resume --run-dir {attempt.folder.path}"
    if saved < 0:
        lines.append(f"  there is no checkpoint yet: {remedy}")
    else:
        lines.append(f"  the last checkpoint is that after iteration {saved}: {remedy}")
    return "\n".join(lines)
