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
from rlgraph.runtime.messages.errors import resume_command

LOCK = "lock"
MAX_TEXT = 1000  # bytes that are read of what the file says
FOLDERS = ("samples", "checkpoints", "logs")  # which a run has from its start
DESCRIBES = ("graph.yaml", "start.json", "plan.txt", "plan.json")  # in the order in which they are written
BEFORE_PLAN = {LOCK, *FOLDERS, *DESCRIBES[:-1], *(f"{name}{ASIDE}" for name in DESCRIBES)}


class Lock:
    """The lock of a folder, which this process holds from its creation to ``release``.

    Invariant: its file names the process that holds it.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of a folder.

        Raises:
            RunError: another process holds it.
        """
        self.handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self.handle, MAX_TEXT).decode().strip() or "another process"
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
    """Check that a folder is empty, or has only the files of a run that ended before it had a plan."""
    names = {file.name for file in path.iterdir()}
    if names <= BEFORE_PLAN:
        return
    remedy = "name another --run-dir"
    if "plan.json" in names:
        remedy = f"continue that run: {resume_command(path)}; or {remedy}"
    raise RunError(f"{path} holds files already\n  {remedy}")


def check_links(path: Path) -> None:
    """Refuse a run directory with links; those of Weights & Biases lead to files of its own."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            path_inside = os.path.join(folder, name)
            if os.path.islink(path_inside):
                law = f"{path_inside} is a link, and a run writes to its own files alone"
                raise RunError(f"{law}\n  put what it leads to in its place")
        folders[:] = {*folders} - {"wandb"}  # os.walk enters what is left in the list
