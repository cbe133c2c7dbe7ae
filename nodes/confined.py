"""A Python program in a process of its own, under limits: of reward.code, and of the tool python.

parent   a process group of its own, in an empty folder, without network ──> reward/program.py
         reads what it says, or gives up after ``timeout``; then kills the group
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

CHILD = str(Path(__file__).with_name("reward") / "program.py")
NO_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    timeout: float  # seconds
    memory: int  # bytes of address space
    file: int  # bytes of any one file that it writes
    network: bool


@contextmanager
def confined(job: Mapping[str, str], limits: Limits) -> Iterator[int]:
    """A process that runs a job, as the file descriptor of what it says; it ends with the block.

    Args:
        job: ``program``; with ``test`` and ``token`` the child says the token once both have run to their
            end, else it says what the program prints.
        limits: that it is held to.
    """
    bounds = {"seconds": math.ceil(limits.timeout) + 1, "memory": limits.memory, "file": limits.file}
    command = [*(() if limits.network else NO_NETWORK), sys.executable, "-I", CHILD]
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryDirectory() as folder:
        json.dump({**job, **bounds}, given)
        given.seek(0)
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        assert child.stdout
        try:
            with child.stdout as said:
                yield said.fileno()
        finally:
            os.killpg(child.pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
            child.wait()


@functools.cache
def isolates() -> bool:
    """Whether a process without network can be started here."""
    if shutil.which(NO_NETWORK[0]) is None:
        return False
    return subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode == 0
