"""``rlgraph eval``: one evaluation, of a run's checkpoint or of the models that a graph names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlgraph.errors import RunError
from rlgraph.files import read_json
from rlgraph.frontend.graph_of_run import graph_of_run
from rlgraph.ir.plan import Target
from rlgraph.reports.plan_file import load
from rlgraph.request import PlanRequest
from rlgraph.runtime.run import Attempt, available_devices, ready
from rlgraph.runtime.rundir.changes import changes
from rlgraph.runtime.rundir.going_back import whole_checkpoint
from rlgraph.runtime.rundir.progress import Progress
from rlgraph.runtime.rundir.rundir import RunDir
from rlgraph.runtime.rundir.start import Start
from rlgraph.runtime.rundir.trackers import Trackers, make_of
from rlgraph.runtime.signals import StopSignals


def evaluate(
    subject: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    *,
    checkpoint: str | None = None,
    run_dir: Path | None = None,
    address: str | None = None,
    inline: bool = False,
    target: Target | None = None,
    track: Sequence[str] = (),
) -> Path:
    """Evaluate the model of a run, or those that a graph names, once; train nothing, and change no run.

    Args:
        subject: the directory of a run, which may go on meanwhile, or a graph as of ``run_graph``.
        checkpoint: of the run, as ``step-000100`` or ``best``; its last one unless given.
        run_dir: where the metrics, samples and logs are kept; ``runs/<graph>-eval`` unless given.
        overrides, devices, address, inline, target, track: as of ``run_graph``; overrides of a run follow
            those that it was started with.

    Returns:
        the directory with ``metrics.jsonl``, whose only line this is, and ``samples/``.

    Raises:
        GraphError: the graph is wrong.
        RunError: there is no such run or checkpoint, no ``eval`` section, or what ``run_graph`` raises.
    """
    trackers = make_of(track)
    available = available_devices(inline, address)

    # 1. Find out what is evaluated: a run's checkpoint, or the models of a graph.
    folder = RunDir(Path(subject))
    plan_file = folder.path / "plan.json"
    origin = load(plan_file).origin if plan_file.is_file() else None
    weights: Path | None = None
    graph = subject
    if origin:
        weights = whole_checkpoint(folder, checkpoint, "--checkpoint").resolve()
        graph, before = graph_of_run(folder.path, origin.graph, origin.overrides)
        overrides = (*before, *overrides)
        target = target or origin.target
    elif checkpoint:
        raise RunError(
            f"{subject} is not a run, and has no checkpoint {checkpoint}\n  name a run, as runs/demo"
        )
    elif (folder.path / "config.json").is_file():
        law = f"{subject} is a model, and a graph says what is measured"
        raise RunError(f"{law}\n  rlgraph eval GRAPH models.policy.path={subject}")

    # 2. Compile it, and check its files.
    plan, tree, inspection = ready(PlanRequest(graph, overrides, devices, target), available)
    start = Start(graph, overrides, devices, target, address, inline, track)
    notes = [warning.render() for warning in inspection.warnings]
    if weights:
        for change in changes(folder.path, read_json(plan_file), plan):
            notes.append(f"other than in the run: {change}")
    if not plan.eval_steps:
        law = f"{graph} has no `eval`, which says what is measured"
        raise RunError(f"{law}\n  give one, as eval='{{report: {{accuracy: rewards}}}}'")

    # 3. Evaluate, into a directory of its own: the run may go on meanwhile.
    with (
        RunDir.fresh(run_dir, f"{plan.graph}-eval") as output,
        Progress(plan, 0, output.path) as progress,
        StopSignals(partial(progress.say, stays=True)) as signals,
    ):
        output.describe(plan, tree, start)
        output.trackers = Trackers(output.path, plan.graph, trackers, note=progress.note)
        for note in notes:
            progress.note(note)
        try:
            attempt = Attempt(plan, output, progress, 0, address, available, signals, inspection.rows)
            with attempt.training() as run:
                run.evaluate(weights)
        except KeyboardInterrupt as stopped:
            raise RunError("stopped at once: nothing was measured") from stopped
        return output.path
