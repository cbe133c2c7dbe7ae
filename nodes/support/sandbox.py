"""A sandbox: a Python program in its own process, under limits, for reward.code and the tool python.

parent   a process group of its own, in an empty folder, without network ──> reward/sandbox_child.py
         reads its output, or gives up after ``timeout``; then kills the group
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlgraph.errors import RunError

CHILD = str(Path(__file__).parents[1] / "reward" / "sandbox_child.py")
NO_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
MIB = 2**20


class NoNetworkError(RunError):
    """A process without network can't be had here; the message says what to change."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    timeout: float  # seconds
    memory: int  # bytes of address space
    file: int  # bytes of any one file that it writes
    network: bool


@contextmanager
def confined(job: Mapping[str, str], limits: Limits) -> Iterator[int]:
    """Start a process for a job; yield the file descriptor of its output, and kill it after the block.

    A job has a ``program``; with ``test`` and ``token`` the child says the token once both have run to their
    end, else it says what the program prints.
    """
    bounds = {"seconds": math.ceil(limits.timeout) + 1, "memory": limits.memory, "file": limits.file}
    command = [*(() if limits.network else NO_NETWORK), sys.executable, "-I", CHILD]
    with tempfile.TemporaryFile("w+") as job_file, tempfile.TemporaryDirectory() as folder:
        json.dump({**job, **bounds}, job_file)
        job_file.seek(0)
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            command,
            stdin=job_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        assert child.stdout
        try:
            with child.stdout as output:
                yield output.fileno()
        finally:
            os.killpg(child.pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
            child.wait()


def check_network(what: str, network: bool) -> None:
    """Check that programs can be run without network, unless they may use it.

    Raises:
        NoNetworkError: they can't be here; ``what`` wants it.
    """
    if not network and not isolates():
        law = f"{what}: no network can't be had here: `{' '.join(NO_NETWORK)} true` fails"
        raise NoNetworkError(f"{law}; allow user namespaces, or set network: true")


@functools.cache
def isolates() -> bool:
    """Return whether a process without network can be started here."""
    if shutil.which(NO_NETWORK[0]) is None:
        return False
    return subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode == 0
