"""A process that waits for the end of a driver, and removes what its run left behind on this machine.

When Ray kills a worker it kills the worker's children too, among them Python's resource tracker, so that the
worker's shared memory stays; and Ray's agents look for their parent only once a minute. This file is run as a
script and imports only the standard library.
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
from pathlib import Path

WORKERS_END_S = 5  # seconds until the workers of a driver that was killed have ended
CLOSED = b"closed"
VARIABLE = "RLGRAPH_SESSION"
RAY_FOLDER = b"/ray/"  # in the paths of Ray's programs
PROGRAM_OPTION = b"-c"  # the argument behind it is a program's text, which may name Ray's folder


class Sweeper:
    """Cleans up when it is closed, or when this process has ended in whatever way."""

    def __init__(self, session: str, segments: str, advice: str) -> None:
        """Start its process.

        Args:
            session: a text that processes started from now on have in their environment; Ray's processes
                with it are killed.
            segments: a glob pattern of the shared-memory files to unlink.
            advice: a line to print for the user if this process is killed.
        """
        command = [sys.executable, "-S", __file__, session, segments, advice]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[VARIABLE] = session

    def remember(self, processes: Iterable[int]) -> None:
        """Have these processes of Ray's, and all that they have started, end with this one."""
        line = " ".join(f"{process}:{start_time(process)}" for process in with_descendants(processes))
        assert self.process.stdin
        with suppress(OSError):  # it was killed
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """End Ray's processes, and unlink the shared memory that workers left behind."""
        os.environ.pop(VARIABLE, None)
        if self.process.poll() is None:
            self.process.communicate(CLOSED)


def main(session: str, segments: str, advice: str) -> None:
    """Wait until the driver closes the pipe to this process or has ended; then clean up."""
    *remembered, last_line = sys.stdin.buffer.read().split(b"\n")
    if last_line != CLOSED:
        unlink(segments)
        with suppress(OSError):  # nobody may be there to read it
            print(f"the run was killed, or a part of Ray was\n  {advice}", file=sys.stderr, flush=True)
        time.sleep(WORKERS_END_S)
    end(session, b" ".join(remembered).decode().split())
    unlink(segments)
    for folder in glob.glob(f"{tempfile.gettempdir()}/{session}-*"):  # of servers whose worker was killed
        shutil.rmtree(folder, ignore_errors=True)


def unlink(segments: str) -> None:
    """Unlink the shared-memory files of a run."""
    for path in glob.glob(segments):
        with suppress(FileNotFoundError):
            os.unlink(path)


def end(session: str, remembered: Iterable[str]) -> None:
    """Kill the processes of Ray's that a run has started on this machine.

    ``remembered`` are texts ``PROCESS:START_TIME``. A process with another start time has only got the same
    number since, and is left alone.
    """
    processes = set(processes_of(session))
    for text in remembered:
        process, started = text.split(":")
        if start_time(int(process)) == started:
            processes.add(int(process))
    for process_id in processes:
        with suppress(OSError):
            os.kill(process_id, signal.SIGKILL)


def processes_of(session: str) -> list[int]:
    """Return the processes of Ray's on this machine that have a session in their environment.

    Ray's agents may lack it: they write their title over the place where their environment began.
    """
    mark = f"{VARIABLE}={session}\0".encode()
    result: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if _is_of_ray(folder) and mark in (folder / "environ").read_bytes():
                result.append(int(folder.name))
    return result


def _is_of_ray(folder: Path) -> bool:
    command = (folder / "cmdline").read_bytes().split(b"\0")
    if PROGRAM_OPTION in command:
        command = command[: command.index(PROGRAM_OPTION)]
    if command and command[0].startswith(b"ray::"):
        return True
    return any(RAY_FOLDER in argument for argument in command)


def with_descendants(processes: Iterable[int]) -> list[int]:
    """Return processes followed by their children, their children's children, and so on."""
    result = [*processes]
    for process in result:  # the list grows while it is walked
        result += children(process)
    return result


def children(process: int) -> list[int]:
    """Return the processes that the threads of a process have started."""
    result: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            result += map(int, thread.read_text().split())
    return result


def start_time(process: int) -> str:
    """Return when a process started, in clock ticks since boot; "" if there is no such process."""
    return status(process, 19)


def status(process: int, field: int) -> str:
    """Return a field of ``/proc/PROCESS/stat``, counted behind the program's name; "" without a process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[field]
    except OSError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
