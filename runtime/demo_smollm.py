"""``rlgraph demo smollm``: gets a small pretrained model, makes questions, and trains the model on them."""

from __future__ import annotations

from pathlib import Path

from rlgraph.errors import RunError
from rlgraph.reports.plan_file import load
from rlgraph.runtime import demo_sums
from rlgraph.runtime.pretrained.packages import Say
from rlgraph.runtime.pretrained.smollm import smollm_folder
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.rundir import RunDir

GRAPH = "demo_smollm"
FILES = Path("demo_files/smollm")  # where the graph looks for the model and the questions
RUN = Path("runs") / GRAPH
# one process with all cores: two send each other all gradients (two cores: 19 s per iteration, not 13)
ONE_DEVICE = "pools.main.devices=1"


def prepare(offline: Path | None = None, say: Say = print) -> None:
    """Put the model and the questions where the graph ``demo_smollm`` looks for them, unless they are there.

    The model stays in the cache; ``demo_files/smollm/model`` is a link to it.

    Args:
        offline, say: as ``smollm_folder`` takes them.

    Raises:
        RunError: the model can't be had, or something else is in the place of the link.
    """
    model = smollm_folder(offline, say)
    FILES.mkdir(parents=True, exist_ok=True)
    link = FILES / "model"
    if link.is_symlink():
        link.unlink()
    if link.exists():
        raise RunError(f"{link} is in the way of a link to {model}\n  remove it, or start elsewhere")
    link.symlink_to(model.absolute(), target_is_directory=True)
    if demo_sums.make(FILES):
        train, test = demo_sums.questions(0)
        say(f"{FILES}: train.parquet ({len(train)} questions), test.parquet ({len(test)})")


def train(say: Say = print) -> Path:
    """Run the graph; return the run directory.

    An earlier run that was stopped is continued. If it has ended, a new one begins, in
    ``runs/demo_smollm-2`` or the next number.
    """
    if not is_unfinished(RUN):
        return run_graph(GRAPH, [ONE_DEVICE])
    say(f"continuing {RUN}")
    return run_graph(GRAPH, [ONE_DEVICE], run_dir=RUN, resume=True)


def is_unfinished(run: Path) -> bool:
    """Return whether a folder holds a run that has not come to its last iteration."""
    plan_file = run / "plan.json"
    return plan_file.is_file() and RunDir(run).saved() < load(plan_file).iterations
