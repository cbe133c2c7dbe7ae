"""Goes back to a checkpoint of a run that is not its last, and sets aside what came after it.

runs/grpo/checkpoints/step-000100                 the run goes on from here
          aside/step-000100/checkpoints/...       the later ones; with the metrics, samples and models of then
                                                  a run directory to look at, and to export from
"""

import shutil
from itertools import count
from pathlib import Path

from rlgraph.errors import RunError, nearest
from rlgraph.files import damaged, read_sums
from rlgraph.runtime.rundir.history import HISTORY
from rlgraph.runtime.rundir.lock import DESCRIBES
from rlgraph.runtime.rundir.rundir import RunDir, iteration_of


def whole_checkpoint(folder: RunDir, name: str | None, option: str) -> Path:
    """Return a run's checkpoint of this name, or its last one, once its files are found to be as written.

    Raises:
        RunError: there is none, or it is damaged; the remedy is to choose another with ``option``.
    """
    complete = {path.name: path for path in folder.checkpoints()}
    if not complete:
        remedy = "it saves one every schedule.save_every iterations, and at its end"
        raise RunError(f"{folder.path} has no checkpoint yet\n  {remedy}")
    name = [*complete][-1] if name is None else name
    if name not in complete:
        law = f"{folder.path} has no checkpoint {name}: it has {', '.join(complete)}"
        raise RunError("\n  ".join([law, *filter(None, [nearest(name, complete)])]))
    sums = read_sums(complete[name])
    if wrong := damaged(complete[name], sums, sums):
        law = f"the checkpoint {complete[name]} is damaged: {', '.join(wrong)}"
        raise RunError(f"{law}\n  choose another with {option}: {', '.join(complete)}")
    return complete[name]


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
