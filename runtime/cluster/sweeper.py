"""A process that waits for the end of a driver, and clears away what is left of its run on this machine.

Ray ends a worker's own children with it, Python's resource tracker among them, so that the shared memory of
workers outlives those that are killed; Ray's agents look for their parent only every minute. This file is run
as a script, which imports nothing but the standard library.
"""

import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

AGAIN_S = 5  # seconds after a driver that was killed: its workers end a little later
CLOSED = b"closed"
VARIABLE = "RLGRAPH_SESSION"
RAY = b"/ray/"  # a part of the paths of Ray's programs
PROGRAM = b"-c"  # behind it comes a program's text, which may name Ray's folder


class Sweeper:
    """Clears away when it is closed, or when this process has ended, however it did."""

    def __init__(self, session: str, segments: str, advice: str) -> None:
        """Start its process.

        Args:
            session: processes that are started from now on have it in their environment, and those of Ray's
                end with this one.
            segments: a pattern of the files of shared memory that it unlinks.
            advice: a line for the user, should this process be killed.
        """
        command = [sys.executable, "-S", __file__, session, segments, advice]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[VARIABLE] = session

    def remember(self, processes: Iterable[int]) -> None:
        """Note that these processes of Ray's end with this one, and those that they have started."""
        line = " ".join(f"{process}:{begun(process)}" for process in family(processes))
        assert self.process.stdin
        with suppress(OSError):  # it was killed
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """End Ray's processes, and unlink what workers have left behind."""
        os.environ.pop(VARIABLE, None)
        if self.process.poll() is None:
            self.process.communicate(CLOSED)


def main(session: str, segments: str, advice: str) -> None:
    """Wait for the end of what is written to this process, which is that of the driver; then clear away."""
    *known, said = sys.stdin.buffer.read().split(b"\n")
    if said != CLOSED:
        unlink(segments)
        with suppress(OSError):  # nobody may be there to read it
            print(f"the run was killed, or a part of Ray was\n  {advice}", file=sys.stderr, flush=True)
        time.sleep(AGAIN_S)
    end(session, b" ".join(known).decode().split())
    unlink(segments)
    for folder in glob.glob(f"{tempfile.gettempdir()}/{session}-*"):  # of servers whose worker was killed
        shutil.rmtree(folder, ignore_errors=True)


def unlink(segments: str) -> None:
    """Unlink the segments of a run."""
    for path in glob.glob(segments):
        with suppress(FileNotFoundError):
            os.unlink(path)


def end(session: str, known: Iterable[str]) -> None:
    """Kill the processes of Ray's on this machine that a run has started."""
    pairs = (one.split(":") for one in known)
    mine = [int(process) for process, when in pairs if begun(int(process)) == when]
    for process in {*mine, *processes_of(session)}:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def processes_of(session: str) -> list[int]:
    """Return the processes of Ray's on this machine that have a session in their environment.

    Ray's agents may lack it: the name by which they call themselves lies where their environment began.
    """
    mark, found = f"{VARIABLE}={session}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            command = [*takewhile(PROGRAM.__ne__, (folder / "cmdline").read_bytes().split(b"\0"))]
            of_ray = command[0].startswith(b"ray::") or any(RAY in part for part in command)
            if of_ray and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def family(processes: Iterable[int]) -> list[int]:
    """Return processes with their children, and those of these."""
    found = [*processes]
    for process in found:  # it grows meanwhile
        found += children(process)
    return found


def children(process: int) -> list[int]:
    """Return the processes that the threads of one have started."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            found += map(int, thread.read_text().split())
    return found


def begun(process: int) -> str:
    """Return when a process began as the system counts it, "" where there is none."""
    return status(process, 19)


def status(process: int, field: int) -> str:
    """Return what Linux says of a process of this host behind its name, "" where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[field]
    except OSError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
