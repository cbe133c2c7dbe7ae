"""The lock of a run directory: one process runs it. The system frees the lock of a process that has ended."""

import fcntl
import os
import socket
from datetime import datetime
from pathlib import Path

from rlgraph.errors import RunError

LOCK = "lock"
TEXT = 1000  # bytes of what stands in it, at most


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
