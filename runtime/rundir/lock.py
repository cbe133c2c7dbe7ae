"""The lock of a run directory, and checks of the folder before a run begins, or goes on, in it.

One process runs it; the system frees the lock of a process that has ended.
"""

import fcntl
import os
import socket
from datetime import datetime
from pathlib import Path

from rlgraph.errors import RunError
from rlgraph.files import ASIDE

LOCK = "lock"
TEXT = 1000  # bytes of what stands in it, at most
FOLDERS = ("samples", "checkpoints", "logs")  # there from the start
DESCRIBES = ("graph.yaml", "plan.txt", "plan.json")  # in the order in which they are written
BEFORE_PLAN = {LOCK, *FOLDERS, *DESCRIBES[:-1], *(f"{name}{ASIDE}" for name in DESCRIBES)}


class Lock:
    """Held from when it is made; its file says by whom."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of a folder.

        Raises:
            RunError: another process holds it.
        """
        self.handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self.handle, TEXT).decode().strip() or "another process"
            self.release()
            remedy = "wait until that run has ended, or name another --run-dir"
            raise RunError(f"{folder} is in use: {holder} runs it\n  {remedy}") from error
        except OSError as error:
            self.release()
            law = f"{folder}: its file system has no locks ({error.strerror}), and two runs could write there"
            raise RunError(f"{law}\n  mount it with them (flock), or name another --run-dir") from error
        since = datetime.now().strftime("%d %B %H:%M")
        os.ftruncate(self.handle, 0)
        os.write(self.handle, f"process {os.getpid()} of {socket.gethostname()}, since {since}\n".encode())

    def release(self) -> None:
        """Free the lock."""
        os.close(self.handle)


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
