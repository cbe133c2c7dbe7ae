"""A sandbox for programs that nobody has read: reward.code, the tool python.

    parent   a socket ──> unshare: namespaces of its own ──> nodes/sandboxed: a new root, no capabilities
             looks 20 times a second at time, memory and processes; kills all of it at a bound, and in the end

What holds in it, by Linux namespaces and as any user:

- It sees Python, its packages and the system's programs and libraries, read-only; no home, no data, no run
  directory, no socket of Ray, no other process. Its environment is PATH, HOME and OMP_NUM_THREADS.
- It writes to /tmp alone, its working folder and home, which lies in memory and is gone with it. All its
  files together take no more than ``file``.
- It has no network, unless ``network``; then it has this host's, loopback too.
- A process has at most ``memory`` of address space. All of them together are killed when they are seen to
  hold more than that, to span more than four times that, or to be more than 64 processes and threads.
  Between two looks they may pass that; the kernel refuses the 65th, but not where the run's user is root.
  Shared memory, queues and semaphores that belong to no process are refused; what lies unread in pipes and
  sockets is not counted, and 64 files per process bound it. The kernel, out of memory, ends what runs here
  first.
- It can't gain rights, make namespaces, signal or trace what is outside. Nothing of it outlives it, and it
  ends by itself after its time, should the run be killed.

What does not hold: it shares the host's kernel, CPUs and memory bandwidth. Against faults of the kernel only
another machine helps.
"""

import contextlib
import functools
import json
import math
import os
import re
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlgraph.errors import RunError
from rlgraph.nodes.sandboxed.confine import TASKS

SANDBOXED = str(Path(__file__).parents[1] / "sandboxed")
NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--ipc")
# what of the system is visible in a sandbox, read-only; with network also how it is reached
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/nix"]
SYSTEM += [f"/etc/{name}" for name in ("ld.so.cache", "alternatives", "localtime")]
CERTIFICATES = ("ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted")
NETWORK = [f"/etc/{name}" for name in ("resolv.conf", "hosts", "nsswitch.conf", *CERTIFICATES)]
# in /proc/PID/status, KiB; what is shared and was touched by a process that has ended is in the second alone
RESIDENT = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+)", re.MULTILINE)
ADDRESS_SPACE = re.compile(rb"^VmSize:\s+(\d+)", re.MULTILINE)
SPANS = 4  # times ``memory`` that all address spaces may be together
CHILDREN = "/proc/thread-self/children"  # some kernels have none
READY = b"ready\n"  # what it says once it is closed
TICK = 0.05  # seconds between two looks at what a sandbox takes
MIB = 2**20


class NoSandboxError(RunError):
    """A sandbox can't be had here; the message says why, and what to change."""


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox."""

    timeout: float  # seconds
    memory: int  # bytes: address space of a process, and what all of them hold
    file: int  # bytes of what it writes
    network: bool = False


TRIAL = Limits(timeout=60.0, memory=1024 * MIB, file=MIB)


@dataclass(frozen=True)
class Sandbox:
    """A process in a sandbox; ``socket`` is its standard input and output."""

    socket: socket.socket
    end: float  # when it is killed, on the clock time.monotonic

    def is_late(self) -> bool:
        """Return whether its time is over."""
        return time.monotonic() >= self.end

    def read(self, most: int) -> bytes:
        """Return the start of what it says, up to its end."""
        output = b""
        with suppress(OSError):
            while len(output) < most:
                received = self.socket.recv(most - len(output))
                if not received:
                    break
                output += received
        return output


@contextmanager
def confined(
    role: str,
    job: Mapping[str, object],
    limits: Limits,
    peer: Sandbox | None = None,
    sandboxed: bool | None = None,
) -> Iterator[Sandbox]:
    """Run a role of ``nodes/sandboxed`` in a sandbox; kill all of it after the block.

    Without namespaces (``check_sandbox``) it is a process group in an empty folder, under the limits alone.

    Args:
        role: a module of ``nodes/sandboxed``, and the function of that name in it.
        job: what the role is told.
        limits: of all that runs there.
        peer: another sandbox, whose socket this one may use; its number is ``peer`` of the job.
        sandboxed: whether it is a sandbox; None: where one can be had.

    Raises:
        NoSandboxError: it did not start, which is a fault of this host.
    """
    if sandboxed is None:
        sandboxed = not trouble()
    with contextlib.ExitStack() as stack:
        try:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            folder = stack.enter_context(contextlib.nullcontext("/") if sandboxed else _folder())
            child = _start(role, theirs, limits, folder, sandboxed, peer)
        except OSError as error:
            raise _not_started(str(error)) from error
        theirs.close()
        sandbox = Sandbox(ours, time.monotonic() + limits.timeout)
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(child.pid, sandbox, limits, ended), daemon=True)
        watch.start()
        try:
            with suppress(OSError):  # it has ended already, and whoever reads finds that out
                ours.sendall(_first_line(job, limits, sandboxed, peer))
            output = sandbox.read(len(READY))
            if output != READY and not sandbox.is_late():
                raise _not_started((output + sandbox.read(MIB)).decode("utf-8", "replace"))
            yield sandbox
        finally:
            ended.set()
            watch.join()
            os.killpg(child.pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
            child.wait()


def check_sandbox(feature: str, allow_unsandboxed: bool) -> None:
    """Check that programs can be run in a sandbox, unless they may run without.

    Raises:
        NoSandboxError: they can't be here; ``feature`` wants it.
    """
    if allow_unsandboxed:
        return
    reason = trouble()
    if reason:
        law = f"{feature}: no sandbox can be had here: {reason}"
        remedy = "allow user namespaces (Linux 5.14, util-linux), or set allow_unsandboxed: true"
        meaning = "programs can then read, write, kill and reach over the network what the run's user can"
        raise NoSandboxError(f"{law}; {remedy}: {meaning}, the run's memory and API keys included")


@functools.cache
def trouble() -> str:
    """Return why no sandbox can be had here, by trying one; empty where it can."""
    if not Path(CHILDREN).exists():
        return f"there is no {CHILDREN}, by which its processes are found (CONFIG_PROC_CHILDREN)"
    if shutil.which(NAMESPACES[0]) is None:
        return f"there is no `{NAMESPACES[0]}`"
    try:
        with confined("show", {"program": "print('fine')"}, TRIAL, sandboxed=True) as sandbox:
            return "" if sandbox.read(MIB).strip() == b"fine" else "it does not run Python"
    except NoSandboxError as error:
        return str(error)


def _not_started(output: str) -> NoSandboxError:
    output = output.strip() or "it ended without a word"
    reasons = [line for line in output.splitlines() if ":" in line] or [output]
    return NoSandboxError(f"a sandbox did not start: {reasons[-1]}")


def _start(
    role: str,
    theirs: socket.socket,
    limits: Limits,
    folder: str,
    sandboxed: bool,
    peer: Sandbox | None,
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", SANDBOXED, role]
    if sandboxed:
        namespaces = NAMESPACES if limits.network else (*NAMESPACES, "--net")
        command = [*namespaces, *command]
    home = "/tmp" if sandboxed else folder
    return subprocess.Popen(
        command,
        stdin=theirs.fileno(),
        stdout=theirs.fileno(),
        stderr=theirs.fileno(),
        cwd=folder,
        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        pass_fds=[peer.socket.fileno()] if peer else [],
    )


def _first_line(job: Mapping[str, object], limits: Limits, sandboxed: bool, peer: Sandbox | None) -> bytes:
    """Return the job as ``nodes/sandboxed`` reads it: a line of JSON."""
    packages = site.getsitepackages()
    visible = list(SYSTEM)
    if limits.network:
        visible += NETWORK
    visible += [sys.base_prefix, sys.prefix, *packages]
    full_job = {
        **job,
        "sandboxed": sandboxed,
        "path": packages,
        "visible": visible,
        "seconds": math.ceil(limits.timeout) + 1,
        "memory": limits.memory,
        "file": limits.file,
        "peer": peer.socket.fileno() if peer else None,
    }
    return json.dumps(full_job).encode() + b"\n"


def _watch(pid: int, sandbox: Sandbox, limits: Limits, ended: threading.Event) -> None:
    """Kill a process group, and so its sandbox, when its time is over or it takes too much."""
    while not ended.wait(TICK):
        if sandbox.is_late() or not _fits(pid, limits.memory):
            os.killpg(pid, signal.SIGKILL)
            with suppress(OSError):  # wakes who reads, even if an escaped process writes
                sandbox.socket.shutdown(socket.SHUT_RDWR)
            return


def _fits(pid: int, memory: int) -> bool:
    """Return whether a process and its descendants are few enough and hold at most ``memory`` bytes."""
    tasks = 0
    most_tasks = TASKS + 2  # unshare and process 1 are not the program's
    resident_kib = 0
    address_space_kib = 0
    processes = [pid]
    while processes:
        folder = Path(f"/proc/{processes.pop()}")
        with suppress(OSError):  # it has ended
            status = (folder / "status").read_bytes()
            resident_kib += sum(map(int, RESIDENT.findall(status)))
            address_space_kib += sum(map(int, ADDRESS_SPACE.findall(status)))
            for task in (folder / "task").iterdir():
                tasks += 1
                processes += map(int, (task / "children").read_text().split())
        if tasks > most_tasks:
            return False
    if resident_kib * 1024 > memory:
        return False
    return address_space_kib * 1024 <= memory * SPANS


@contextmanager
def _folder() -> Iterator[str]:
    """Make a folder and remove it, whatever a program made of it; what can't be removed stays."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, timeout=60, check=False)
