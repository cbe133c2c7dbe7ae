"""``rlgraph eval``: one evaluation, of a run's checkpoint or of the models that a graph names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlgraph.errors import RunError
from rlgraph.files import read_json
from rlgraph.ir.plan import Target
from rlgraph.reports.plan_file import load
from rlgraph.request import PlanRequest
from rlgraph.runtime.run import Attempt, devices_there, ready
from rlgraph.runtime.rundir.changes import changes
from rlgraph.runtime.rundir.going_back import whole_checkpoint
from rlgraph.runtime.rundir.progress import Progress
from rlgraph.runtime.rundir.rundir import RunDir
from rlgraph.runtime.rundir.trackers import Trackers, make_of
from rlgraph.runtime.signals import StopSignals
from rlgraph.syntax.yaml_text import show_text


def evaluate(
    what: str,
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
        what: the directory of a run, which may go on meanwhile, or a graph as of ``run_graph``.
        checkpoint: of the run, as ``step-000100`` or ``best``; its last one unless given.
        run_dir: where the metrics, samples and logs are kept; ``runs/<graph>-eval`` unless given.
        overrides, devices, address, inline, target, track: as of ``run_graph``; of a run those beside
            its own.

    Returns:
        the directory with ``metrics.jsonl``, whose only line this is, and ``samples/``.

    Raises:
        GraphError: the graph is wrong.
        RunError: there is no such run or checkpoint, no ``eval`` section, or what ``run_graph`` raises.
    """
    trackers = make_of(track)
    there, folder, saved = devices_there(inline, address), RunDir(Path(what)), None
    origin = load(folder.path / "plan.json").origin if (folder.path / "plan.json").is_file() else None
    if origin:
        saved = whole_checkpoint(folder, checkpoint, "--checkpoint").resolve()
        what, overrides, target = origin.graph, (*origin.overrides, *overrides), target or origin.target
    elif checkpoint:
        raise RunError(f"{what} is no run, and has no checkpoint {checkpoint}\n  name a run, as runs/demo")
    elif (folder.path / "config.json").is_file():
        law = f"{what} is a model, and a graph says what is measured"
        raise RunError(f"{law}\n  rlgraph eval GRAPH models.policy.path={what}")
    plan, tree, looked_at = ready(PlanRequest(what, overrides, devices, target), there)
    notes = [warning.render() for warning in looked_at.warnings]
    if saved:
        changed = changes(folder.path, read_json(folder.path / "plan.json"), plan)
        notes += [f"other than in the run: {change}" for change in changed]
    if not plan.eval_steps:
        law = f"{what} has no `eval`, which says what is measured"
        raise RunError(f"{law}\n  give one, as eval='{{report: {{accuracy: rewards}}}}'")
    with (
        RunDir.fresh(run_dir, f"{plan.graph}-eval") as own,
        Progress(plan, 0, own.path) as progress,
        StopSignals(partial(progress.say, stays=True)) as signals,
    ):
        own.describe(plan, show_text(tree.written()))
        own.trackers = Trackers(own.path, plan.graph, trackers, note=progress.note)
        for note in notes:
            progress.note(note)
        try:
            attempt = Attempt(plan, own, progress, 0, address, there, signals, looked_at.rows)
            with attempt.training() as run:
                run.evaluate(saved)
        except KeyboardInterrupt as stopped:
            raise RunError("stopped at once: nothing was measured") from stopped
        return own.path
