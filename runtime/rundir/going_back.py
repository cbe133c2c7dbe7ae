"""Goes back to an earlier checkpoint of a run, and sets aside everything that came after it.

runs/grpo/checkpoints/step-000100                 the run goes on from here
          aside/step-000100/checkpoints/...       the later ones; with the metrics, samples and models of then
                                                  a run directory to look at, and to export from
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rlgraph.errors import RunError, nearest
from rlgraph.files import damaged, read_sums
from rlgraph.ir.best_checkpoints import BestCheckpoints
from rlgraph.reports.plan_file import load
from rlgraph.runtime.rundir.history import HISTORY
from rlgraph.runtime.rundir.lock import DESCRIBES
from rlgraph.runtime.rundir.rundir import RunDir, free_folder, iteration_of

BEST = "best"  # a name for the best checkpoint, whichever it is


def whole_checkpoint(folder: RunDir, name: str | None, option: str) -> Path:
    """Return a run's checkpoint of this name, or its last one, after a check that its files are undamaged.

    The name ``best`` stands for the best one by the run's ``schedule.best``.

    Raises:
        RunError: there is no such checkpoint, or it is damaged; the remedy is another, by ``option``.
        GraphError: the run's plan, which says what is best, can't be read.
    """
    complete = {path.name: path for path in folder.checkpoints()}
    if not complete:
        remedy = "it saves one as schedule.save_every says, and at its end"
        raise RunError(f"{folder.path} has no checkpoint yet\n  {remedy}")
    if name == BEST:
        name = _best(folder, [*complete])
    if name is None:
        name = [*complete][-1]
    if name not in complete:
        law = f"{folder.path} has no checkpoint {name}: it has {', '.join(complete)}"
        advice = nearest(name, (*complete, BEST))
        raise RunError(f"{law}\n  {advice}" if advice else law)
    sums = read_sums(complete[name])
    damaged_files = damaged(complete[name], sums, sums)
    if damaged_files:
        law = f"the checkpoint {complete[name]} is damaged: {', '.join(damaged_files)}"
        raise RunError(f"{law}\n  choose another with {option}: {', '.join(complete)}")
    return complete[name]


def _best(folder: RunDir, complete: Sequence[str]) -> str:
    """Return the name of a run's best checkpoint."""
    best = load(folder.path / "plan.json").schedule.best
    if best is None:
        law = f"{folder.path} has no best checkpoint: its graph has no schedule.best"
        raise RunError(f"{law}\n  name one: {', '.join(complete)}")
    lasting = folder.lasting()
    ranking = BestCheckpoints(best, folder.earlier()).among(lasting)
    if not ranking:
        law = f"{folder.path} has no best checkpoint yet: no evaluation has measured `{best.metric}`"
        raise RunError(f"{law}\n  name another: {', '.join(complete)}")
    return lasting[ranking[0].iteration].name


def go_back(folder: RunDir, name: str) -> Path | None:
    """Make a checkpoint the last one of its run; return the folder with what came after it, if anything did.

    Raises:
        RunError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = whole_checkpoint(folder, name, "--resume-from")
    checkpoints = folder.checkpoints()
    later_checkpoints = checkpoints[checkpoints.index(checkpoint) + 1 :]
    # checkpoints last, and the newest of them first: if this is interrupted, what is left is still a run
    candidates = [
        *folder.written_after(iteration_of(checkpoint)),
        folder.path / "models",
        *reversed(later_checkpoints),
    ]
    later = [path for path in candidates if path.exists()]
    if not later:
        return None
    aside = free_folder(folder.path / "aside" / checkpoint.name)
    aside.mkdir(parents=True)
    for file in (*DESCRIBES, *HISTORY):
        if (folder.path / file).is_file():
            shutil.copyfile(folder.path / file, aside / file)
    for path in later:
        target = aside / path.relative_to(folder.path)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    return aside
