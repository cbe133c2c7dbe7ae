"""``rlgraph run``: compile, check what the graph needs, and train."""

from __future__ import annotations

import os
import shlex
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
from rlgraph.frontend.compose import as_written
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.plan import Plan, Target
from rlgraph.nodes.support.data_file import local_path
from rlgraph.passes.lower import in_one_process
from rlgraph.planning.device_groups import together, whole_hosts
from rlgraph.reports.plan_file import check_inline, compilation_of, is_plan
from rlgraph.request import PlanRequest
from rlgraph.runtime.cluster.cluster import InlineCluster, RayCluster
from rlgraph.runtime.cluster.devices import Devices, agree, of_machine, of_ray
from rlgraph.runtime.cluster.failures import FailedError, LostError, of_files
from rlgraph.runtime.cluster.interface import WorkerCluster
from rlgraph.runtime.messages.errors import resume_command
from rlgraph.runtime.messages.log_level import LEVEL
from rlgraph.runtime.preflight import Inspection, preflight
from rlgraph.runtime.rundir.changes import changes
from rlgraph.runtime.rundir.endpoint import MetricsEndpoint
from rlgraph.runtime.rundir.going_back import go_back
from rlgraph.runtime.rundir.progress import Progress
from rlgraph.runtime.rundir.rundir import RunDir, free_folder
from rlgraph.runtime.rundir.start import Start, forgotten
from rlgraph.runtime.rundir.trackers import Trackers, make_of
from rlgraph.runtime.signals import StopSignals
from rlgraph.runtime.training import TrainingRun
from rlgraph.syntax.source import NOWHERE, Tree
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
    keep_settings: bool | None = None,
) -> Path:
    """Compile a graph and train; the run directory is returned.

    Args:
        graph: a path, the name of a shipped graph, or a saved plan (``rlgraph plan GRAPH -o plan.json``),
            which goes with no overrides and devices: what it was made with is settled. Or the folder of a
            run, to go on with it (``resume``) or to run it again as it was: what is not given here is as it
            was there, and overrides follow those of the run.
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
        keep_settings: of a resume that names a graph: take overrides that the run had and ``overrides`` lacks
            (True), or go on without them (False). None: it is an error that some are missing.

    Raises:
        GraphError: the graph, or a file that it names, is wrong.
        RunError: the run could not start, or can't go on with settings that have changed, a saved plan is
            not what its graph gives now, a plan is for other devices than there are, a step failed, or
            workers were lost more often than ``schedule.restarts`` allows.
        StoppedError: a signal or the time limit has ended it, with a checkpoint.
    """
    if log_level:
        os.environ[LEVEL] = log_level
    resume = resume or resume_from is not None
    start = Start(graph, overrides, devices, target, address, inline, track, steps)
    request = PlanRequest(graph, overrides, devices, target)
    if is_run(graph):
        run_dir = _run_dir_of_run(Path(graph), run_dir, resume)
        start, request = _started_again(start, resume)
    elif resume:
        overrides = _with_forgotten(run_dir, start, keep_settings)
        start = replace(start, overrides=overrides)
        request = replace(request, overrides=overrides)
    trackers = make_of(start.track)
    available = available_devices(start.inline, start.address)

    # 1. Compile, and check the files that the plan names.
    plan, tree, inspection = ready(request, available, strict)
    total = plan.iterations if start.steps is None else start.steps
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
            folder.describe(plan, tree, start)

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
                attempt = Attempt(plan, folder, progress, total, start.address, available, signals, rows)
                _train(attempt, resume)
            progress.farewell()
            return folder.path
    except OSError as error:
        law = of_files(error, path)
        if law:
            raise RunError(law) from error
        raise


def is_run(graph: str) -> bool:
    """Return whether what was given for a graph is the folder of a run; a shipped graph's name is not."""
    return os.path.isfile(os.path.join(graph, "plan.json")) and graph not in shipped_graphs()


def _run_dir_of_run(run: Path, run_dir: Path | None, resume: bool) -> Path:
    """Return the folder for a run that goes on, or one to run it again in; absolute, should it move.

    Raises:
        RunError: it is to go on in another folder.
    """
    if resume:
        if run_dir and run_dir.resolve() != run.resolve():
            law = f"{run} goes on in its own folder, and --run-dir is another: {run_dir}"
            raise RunError(f"{law}\n  leave out --run-dir; or leave out --resume, to run it again there")
        run_dir = run
    run_dir = run_dir or free_folder(run)
    is_moving = Path(Start.read(run).folder).resolve() != Path().resolve()
    return run_dir.resolve() if is_moving else run_dir


def _started_again(start: Start, resume: bool) -> tuple[Start, PlanRequest]:
    """Return how a run is started that is named by its folder, and what to compile.

    What ``start`` leaves open is as it was for that run. The working folder is the run's from here on, if it
    is still there, since paths are relative to it. A run that has done its ``steps`` goes on to the end of
    its schedule.
    """
    run = Path(start.graph).resolve()
    before = Start.read(run)
    steps = before.steps if start.steps is None else start.steps
    is_done = resume and start.steps is None and steps is not None and RunDir(run).saved() >= steps
    has_devices = start.inline or start.address or start.devices or start.target
    devices = start if has_devices else before
    if os.path.isdir(before.folder):
        os.chdir(before.folder)
    request = replace(before, devices=devices.devices, target=devices.target).request(run, start.overrides)
    again = replace(
        before,
        overrides=(*before.overrides, *start.overrides),
        devices=devices.devices,
        target=devices.target,
        address=devices.address,
        inline=devices.inline,
        track=start.track or before.track,
        steps=None if is_done else steps,
        folder=os.getcwd(),
    )
    return again, request


def forgotten_settings(graph: str, overrides: Sequence[str], run_dir: Path | None) -> list[str]:
    """Return the overrides of the run in a folder that a resume with a graph leaves out."""
    if is_plan(graph) or is_run(graph):
        return []
    return forgotten(run_dir or _default_run_dir(graph, overrides), graph, overrides)


def _default_run_dir(graph: str, overrides: Sequence[str]) -> Path:
    """Return the folder of a graph's first run."""
    name = as_written(graph, overrides).get("graph")
    return Path("runs") / str(name.value if name else "")


def _with_forgotten(run_dir: Path | None, start: Start, keep_settings: bool | None) -> tuple[str, ...]:
    """Return the overrides of a run that goes on with a graph that is named.

    Raises:
        RunError: the run had others that are left out, and nobody said what becomes of them.
    """
    missing: list[str] = []
    if keep_settings is not False:
        missing = forgotten_settings(start.graph, start.overrides, run_dir)
    if missing and keep_settings is None:
        run_dir = run_dir or _default_run_dir(start.graph, start.overrides)
        law = f"{run_dir} was started with {shlex.join(missing)}, which is left out now"
        remedy = "add --keep-settings to go on with it, or --drop-settings to go on without it; "
        remedy += f"{resume_command(run_dir)} needs neither"
        raise RunError(f"{law}\n  {remedy}")
    return (*missing, *start.overrides)


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
        the plan, the graph as written, and what the files say, with the warnings of both.
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
    return plan, compilation.written, inspection


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
        except FailedError as error:
            error.keep_details(self.folder.path)
            raise
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
    remedy = f"continue with: {resume_command(attempt.folder.path)}"
    if saved < 0:
        lines.append(f"  there is no checkpoint yet: {remedy}")
    else:
        lines.append(f"  the last checkpoint is that after iteration {saved}: {remedy}")
    return "\n".join(lines)
