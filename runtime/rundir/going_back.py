"""Goes back to a checkpoint of a run that is not its last, and sets aside what came after it.

runs/grpo/checkpoints/step-000100                 the run goes on from here
          aside/step-000100/checkpoints/...       the later ones; with the metrics, samples and models of then
                                                  a run directory to look at, and to export from
"""

import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from rlgraph.errors import RunError, nearest
from rlgraph.files import damaged, read_sums
from rlgraph.ir.best_checkpoints import BestCheckpoints
from rlgraph.reports.plan_file import load
from rlgraph.runtime.rundir.history import HISTORY
from rlgraph.runtime.rundir.lock import DESCRIBES
from rlgraph.runtime.rundir.rundir import RunDir, iteration_of

BEST = "best"  # a name for the best checkpoint, whichever it is


def whole_checkpoint(folder: RunDir, name: str | None, option: str) -> Path:
    """Return a run's checkpoint of this name, or its last one, once its files are found to be as written.

    The name ``best`` is that of the best one, by the run's ``schedule.best``.

    Raises:
        RunError: there is none, or it is damaged; the remedy is to choose another with ``option``.
        GraphError: the run's plan can't be read, which says what is best.
    """
    complete = {path.name: path for path in folder.checkpoints()}
    if not complete:
        remedy = "it saves one as schedule.save_every says, and at its end"
        raise RunError(f"{folder.path} has no checkpoint yet\n  {remedy}")
    if name == BEST:
        name = _best(folder, [*complete])
    name = [*complete][-1] if name is None else name
    if name not in complete:
        law = f"{folder.path} has no checkpoint {name}: it has {', '.join(complete)}"
        raise RunError("\n  ".join([law, *filter(None, [nearest(name, (*complete, BEST))])]))
    sums = read_sums(complete[name])
    if wrong := damaged(complete[name], sums, sums):
        law = f"the checkpoint {complete[name]} is damaged: {', '.join(wrong)}"
        raise RunError(f"{law}\n  choose another with {option}: {', '.join(complete)}")
    return complete[name]


def _best(folder: RunDir, complete: Sequence[str]) -> str:
    """Return the name of a run's best checkpoint."""
    best = load(folder.path / "plan.json").schedule.best
    if best is None:
        law = f"{folder.path} has no best checkpoint: its graph has no schedule.best"
        raise RunError(f"{law}\n  name one: {', '.join(complete)}")
    if not (ranking := BestCheckpoints(best, folder.earlier()).among(lasting := folder.lasting())):
        law = f"{folder.path} has no best checkpoint yet: no evaluation has measured `{best.metric}`"
        raise RunError(f"{law}\n  name another: {', '.join(complete)}")
    return lasting[ranking[0].iteration].name


def go_back(folder: RunDir, name: str) -> Path | None:
    """Make a checkpoint the last one of its run; return the folder with what came after it, if anything did.

    Raises:
        RunError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = whole_checkpoint(folder, name, "--resume-from")
    every, iteration = folder.checkpoints(), iteration_of(checkpoint)
    later = [*folder.written_after(iteration), folder.path / "models"]
    later += reversed(every[every.index(checkpoint) + 1 :])  # until the last of them is gone, so is nothing
    if not any(path.exists() for path in later):
        return None
    name = checkpoint.name
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    aside = next(path for other in names if not (path := folder.path / "aside" / other).exists())
    aside.mkdir(parents=True)
    for file in (*DESCRIBES, *HISTORY):
        if (folder.path / file).is_file():
            shutil.copyfile(folder.path / file, aside / file)
    for path in filter(Path.exists, later):
        place = aside / path.relative_to(folder.path)
        place.parent.mkdir(exist_ok=True)
        path.rename(place)
    return aside
