"""An SGLang server as a process of this one: launched, awaited, and never left behind."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlgraph.errors import RunError

CPU = Path(__file__).parent / "cpu"  # on PYTHONPATH of a server without a GPU: what a CUDA build would bring
LAST = 30  # lines of a log that an error shows
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Launch:
    """What decides how a server runs.

    Attributes:
        path: a Hugging Face directory or name.
        device: ``cpu`` or ``cuda``.
        dtype: of weights and computation.
        group: devices that it spans (tensor parallelism).
        tokens: positions that its cache holds.
        max_rows: requests that run at a time.
    """

    path: str
    device: str
    dtype: str
    group: int
    tokens: int
    max_rows: int

    def arguments(self, host: str, port: int, key: str) -> list[str]:
        """The command line after ``python``."""
        given: dict[str, object] = {
            "model-path": self.path,
            "device": self.device,
            "dtype": self.dtype,
            "tp-size": self.group,
            "host": host,
            "port": port,
            "api-key": key,
            "max-total-tokens": self.tokens,
            "max-running-requests": self.max_rows,
            "grammar-backend": "none",
            "log-level": "warning",
        }
        flags = ["skip-server-warmup"]
        if self.device == "cpu":
            given |= {
                "attention-backend": "torch_native",
                "sampling-backend": "pytorch",
                "mem-fraction-static": 0.1,
            }
            flags += ["disable-cuda-graph", "disable-overlap-schedule"]
        else:
            flags += ["enable-memory-saver"]
        options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return ["-m", "sglang.launch_server", *options, *(f"--{flag}" for flag in flags)]

    def environment(self, given: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
        """The server's environment: its devices, and what a memory saver and a CPU need."""
        found = dict(given)
        if self.device == "cpu":
            found["PYTHONPATH"] = os.pathsep.join([str(CPU), *filter(None, [given.get("PYTHONPATH")])])
            found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(devices)
        else:
            # expandable segments break the memory saver
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                found.pop(name, None)
            found["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return found


@dataclass(frozen=True)
class Address:
    """Where a server answers, and the key that it asks for."""

    url: str
    key: str


class Server:
    """A running server. It ends with this process, however that ends."""

    def __init__(
        self, launch: Launch, log: Path, devices: Sequence[str], python: str = sys.executable
    ) -> None:
        """Start it; ``wait`` says when it answers.

        Args:
            launch: how it runs.
            log: the file that takes all that it prints.
            devices: GPUs by their number, or on a CPU the cores of each member of its group, as ``0-1``.
            python: the interpreter that has SGLang.
        """
        self.launch, self.log = launch, log
        host = "127.0.0.1"  # its group's devices are all on this host
        port = _free_port(host)
        self.address = Address(f"http://{host}:{port}", secrets.token_hex(16))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [python, *launch.arguments(host, port, self.address.key)],
                env=launch.environment(os.environ, devices),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def wait(self, timeout: float) -> None:
        """Return when it answers.

        Raises:
            RunError: it ended, or did not answer in time: with its last lines.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RunError(
                    f"the SGLang server of {self.launch.path} ended ({self._how()}){self.last_lines()}"
                )
            if _answers(f"{self.address.url}/health", self.address.key):
                return
            time.sleep(0.2)
        self.close()
        law = f"the SGLang server of {self.launch.path} did not answer within {timeout:.0f} s"
        raise RunError(f"{law}{self.last_lines()}")

    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None

    def last_lines(self) -> str:
        """The end of its log, for an error."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST:]
        return "".join(f"\n    {line}" for line in [f"the end of {self.log}:", *lines])

    def close(self) -> None:
        """End it and all that it started."""
        if self.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _how(self) -> str:
        code = self.process.returncode
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _answers(url: str, key: str) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
