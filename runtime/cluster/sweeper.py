"""A process that waits for the end of a driver, and clears away what is left of its run on this machine.

Ray ends a worker's own children with it, Python's resource tracker among them, so that the shared memory of
workers outlives those that are killed; Ray's agents look for their parent only every minute. This file is run
as a script, which imports nothing but the standard library.
"""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

SEGMENTS = "/dev/shm"  # Linux has POSIX shared memory there
AGAIN_S = 5  # seconds after a driver that was killed: its workers end a little later
CLOSED = "closed\n"


class Sweeper:
    """Clears away when it is closed, or when this process has ended, however it did."""

    def __init__(self, session: str) -> None:
        """Start its process; names of the shared memory that it unlinks begin with ``session``."""
        command = [sys.executable, "-S", __file__, session]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, bufsize=1, start_new_session=True
        )

    def of_ray(self, session: str) -> None:
        """End processes of a session of Ray too, by its name, should this process be killed."""
        assert self.process.stdin
        self.process.stdin.write(f"{session}\n")

    def close(self) -> None:
        """Unlink what workers have left behind; they have ended."""
        if self.process.poll() is None:
            self.process.communicate(CLOSED)


def main(session: str) -> None:
    """Wait for the end of what is written to this process, which is that of the driver; then clear away."""
    lines = sys.stdin.readlines()
    unlink(session)
    if lines[-1:] == [CLOSED]:
        return
    time.sleep(AGAIN_S)
    unlink(session)
    for line in lines:
        end(line.strip())


def unlink(session: str) -> None:
    """Unlink the segments of a run."""
    for path in glob.glob(f"{SEGMENTS}/{session}-*"):
        with suppress(FileNotFoundError):
            os.unlink(path)


def end(ray: str) -> None:
    """Kill the processes of Ray's own that have the name of a session in their arguments."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (folder / "cmdline").read_text(errors="replace")
            if ray in arguments and "/ray/" in arguments.partition("\0--")[0]:
                os.kill(int(folder.name), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
