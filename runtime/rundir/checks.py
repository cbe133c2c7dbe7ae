"""Checks of a folder before a run begins, or goes on, in it."""

import os
from pathlib import Path

from rlgraph.errors import RunError
from rlgraph.files import ASIDE
from rlgraph.runtime.rundir.lock import LOCK

FOLDERS = ("samples", "checkpoints", "logs")  # there from the start
DESCRIBES = ("graph.yaml", "plan.txt", "plan.json")  # in the order in which they are written
BEFORE_PLAN = {LOCK, *FOLDERS, *DESCRIBES[:-1], *(f"{name}{ASIDE}" for name in DESCRIBES)}


def check_free(path: Path) -> None:
    """Check that a folder holds no more than what a run leaves that ended before it had a plan."""
    held = {file.name for file in path.iterdir()}
    if not held <= BEFORE_PLAN:
        remedy = "continue that run with --resume, or name" if "plan.json" in held else "name"
        raise RunError(f"{path} holds files already\n  {remedy} another --run-dir")


def check_links(path: Path) -> None:
    """Refuse a run directory with links; those of Weights & Biases lead to files of its own."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            if os.path.islink(place := os.path.join(folder, name)):
                law = f"{place} is a link, and a run writes to its own files alone"
                raise RunError(f"{law}\n  put what it leads to in its place")
        folders[:] = {*folders} - {"wandb"}
