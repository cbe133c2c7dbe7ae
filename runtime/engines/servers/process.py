"""A server as a process of this one: launched, awaited, and never left behind."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rlgraph.errors import RunError
from rlgraph.runtime.engines.servers.endpoint import Endpoint
from rlgraph.runtime.engines.servers.ports import ServerPort
from rlgraph.runtime.messages.address import host_port

LAST = 30  # lines of a log that an error shows
END = 60.0  # seconds that a killed server's processes have to be gone, and their memory with them
PR_SET_PDEATHSIG = 1
COMPILED = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"  # what torch compiles outlives a server


class EndedError(RunError):
    """The process of a server ended before it answered."""


ServerClient = TypeVar("ServerClient", bound=Endpoint)  # what speaks to a server
ServerClientOf = TypeVar("ServerClientOf", bound=Endpoint, covariant=True)


class Program(Protocol[ServerClientOf]):
    """The settings of a server's process: the model's path, a file, the command line, the environment."""

    @property
    def name(self) -> str:
        """Return the name that its logs have."""

    @property
    def shared(self) -> str:
        """Return the beginning of the paths of files that its processes share."""

    @property
    def path(self) -> str:
        """Return the model's directory or hub name."""

    @property
    def kind(self) -> type[ServerClientOf]:
        """Return the class of what speaks to the server."""

    def configuration(self, host: str, port: int, key: str) -> str:
        """Return the content of a file that the server reads as it starts: its API key is nowhere else."""

    def arguments(self, configuration: Path) -> list[str]:
        """Return the command line after ``python``, which names that file."""

    def environment(self, given: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
        """Return the server's environment, from that of this process."""


class Server(Generic[ServerClient]):
    """A running server. It ends with this process, however that ends."""

    def __init__(
        self,
        launch: Program[ServerClient],
        logs: Path,
        devices: Sequence[str],
        host: str,
        predecessor: Server[ServerClient] | None = None,
    ) -> None:
        """Start it; ``wait`` says when it answers.

        Args:
            launch: how it runs.
            logs: the folder of its log, which takes all that it prints and is named after host and port.
            devices: GPUs by their number, or on a CPU the cores of each member of its group, as ``0,1``.
            host: the address of the interface that it answers on.
            predecessor: the server whose place it takes, port and key.
        """
        self.launch = launch
        self.closed = False
        if predecessor:
            self.port: ServerPort = predecessor.port
            self.client: ServerClient = predecessor.client
        else:
            self.port = ServerPort(host, _first_number(devices))
            url = f"http://{host_port(host, self.port.number)}"
            self.client = launch.kind(url, secrets.token_hex(16))
        self.log = logs / f"{launch.name}-{host}-{self.port.number}.log"
        logs.mkdir(parents=True, exist_ok=True)
        # what it writes to its folder of temporary files, as SGLang its sockets, goes with it or the run
        self.folder = Path(tempfile.mkdtemp(prefix=f"{os.environ.get('RLGRAPH_SESSION', 'rlgraph')}-"))
        self.configuration = self.folder / "server.yaml"  # SGLang takes no other suffix
        self.configuration.touch(mode=0o600)
        self.configuration.write_text(launch.configuration(host, self.port.number, self.client.key))
        inherited = {**os.environ, "TMPDIR": str(self.folder)}
        # not the first: setproctitle finds no title's place once torch has set that variable again
        inherited.setdefault("TORCHINDUCTOR_CACHE_DIR", COMPILED)
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, *launch.arguments(self.configuration)],
                env=launch.environment(inherited, devices),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def wait(self, timeout: float) -> None:
        """Return when it answers.

        Raises:
            EndedError: it ended: with its last lines.
            RunError: it did not answer in time: likewise.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if not self.is_alive():
                self.close()
                raise EndedError(f"{self.obituary()}{self.last_lines()}")
            if self.client.is_healthy():
                self.unlink_files()
                return
            time.sleep(0.2)
        self.close()
        law = f"the {self.client.title} of {self.launch.path} did not answer within {timeout:.0f} s"
        raise RunError(f"{law}{self.last_lines()}")

    def unlink_files(self) -> None:
        """Unlink what it has read as it started, and shared files: open to its processes, they would stay."""
        self.configuration.unlink(missing_ok=True)
        for process in _running(self.process.pid):
            for handle in Path("/proc").glob(f"{process}/fd/*"):
                with suppress(OSError):  # closed meanwhile, or unlinked
                    if (opened := os.readlink(handle)).startswith(self.launch.shared):
                        os.unlink(opened)

    def is_alive(self) -> bool:
        """Return whether its process runs."""
        return self.process.poll() is None

    def last_lines(self) -> str:
        """Return the end of its log, for an error."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST:]
        return "".join(f"\n    {line}" for line in [f"the end of {self.log}:", *lines])

    def has_lost_its_port(self) -> bool:
        """Return whether it ended since another program had taken its port."""
        log = self.log.read_text(encoding="utf-8", errors="replace").lower()
        return not self.is_alive() and "address already in use" in log

    def close(self) -> None:
        """End it and all that it started, and wait until that is gone: until then it holds its memory."""
        if not self.closed:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.closed = True
        self.process.wait()
        end = time.monotonic() + END
        while _running(self.process.pid) and time.monotonic() < end:
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    def obituary(self) -> str:
        """Return how it ended, or that it runs and does not answer."""
        law = f"the {self.client.title} of {self.launch.path}"
        try:
            code = self.process.wait(1.0)  # a killed process may outlive its last answer
        except subprocess.TimeoutExpired:
            return f"{law} does not answer any more"
        if code < 0:
            return f"{law} ended (signal {signal.Signals(-code).name})"
        return f"{law} ended (exit code {code})"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _first_number(devices: Sequence[str]) -> int:
    """Return the number of the first device, or of the first core; 0 of a device without a number."""
    device = devices[0].partition(",")[0]
    return int(device) if device.isdecimal() else 0


def _running(group: int) -> list[int]:
    """Return the processes of a group that hold memory; a dead one that is not waited for holds none."""
    alive = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, process_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            dead = state in "ZX" and len([*(folder / "task").iterdir()]) <= 1
            if int(process_group) == group and not dead:
                alive.append(int(folder.name))
    return alive
