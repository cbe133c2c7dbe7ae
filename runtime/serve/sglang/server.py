"""An SGLang server as a process of this one: launched, awaited, and never left behind."""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rlgraph.errors import RunError
from rlgraph.runtime.serve.sglang.client import Client

CPU = Path(__file__).parent / "cpu"  # on PYTHONPATH of a server without a GPU: what a CUDA build would bring
PORTS = range(20000, 32000)  # above Ray's, below the kernel's
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

    def settings(self) -> dict[str, object]:
        """Of SGLang, by its own names; true is a flag."""
        given: dict[str, object] = {
            "model_path": self.path,
            "device": self.device,
            "dtype": self.dtype,
            "tp_size": self.group,
            "max_total_tokens": self.tokens,
            "max_running_requests": self.max_rows,
            "grammar_backend": "none",
            "log_level": "warning",
            "sleep_on_idle": True,  # else it keeps a core busy while others train
        }
        if self.device != "cpu":
            return given | {"enable_memory_saver": True}
        return given | {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "mem_fraction_static": 0.1,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
        }

    def arguments(self, host: str, port: int, key: str) -> list[str]:
        """The command line after ``python``."""
        given = self.settings() | {"host": host, "port": port, "api_key": key, "skip_server_warmup": True}
        words = ["-m", "sglang.launch_server"]
        for name, value in given.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    def environment(self, given: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
        """The server's environment: its devices, and what a memory saver and a CPU need."""
        found = dict(given)
        if self.device == "cpu":
            found["PYTHONPATH"] = os.pathsep.join([str(CPU), *filter(None, [given.get("PYTHONPATH")])])
            found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(devices)
            # a thread a core: more wait for one another at the end of every operation
            found["OMP_NUM_THREADS"] = str(len(devices[0].split(",")))
        else:
            # expandable segments break the memory saver
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                found.pop(name, None)
            found["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return found


class Server:
    """A running server. It ends with this process, however that ends."""

    def __init__(
        self, launch: Launch, logs: Path, devices: Sequence[str], host: str, client: Client | None = None
    ) -> None:
        """Start it; ``wait`` says when it answers.

        Args:
            launch: how it runs.
            logs: the folder of its log, which takes all that it prints and is named after host and port.
            devices: GPUs by their number, or on a CPU the cores of each member of its group, as ``0,1``.
            host: the address of the interface that it answers on.
            client: of the server whose place it takes, port and key; a new one unless given.
        """
        self.launch, self.closed = launch, False
        self.client = client or Client(f"http://{host}:{free_port(host)}", secrets.token_hex(16))
        port = urlsplit(self.client.url).port
        assert port
        self.log = logs / f"sglang-{host}-{port}.log"
        logs.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, *launch.arguments(host, port, self.client.key)],
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
            if not self.is_alive():
                self.close()
                raise RunError(f"{self.obituary()}{self.last_lines()}")
            if self.client.is_healthy():
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
        """End it and all that it started, which outlives it for a while where it alone was killed."""
        if not self.closed:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.closed = True
        self.process.wait()

    def obituary(self) -> str:
        """How it ended, or that it runs and does not answer."""
        law = f"the SGLang server of {self.launch.path}"
        try:
            code = self.process.wait(1.0)  # one that was killed is not quite gone when it stops answering
        except subprocess.TimeoutExpired:
            return f"{law} does not answer any more"
        return f"{law} ended ({f'exit code {code}' if code >= 0 else f'signal {signal.Signals(-code).name}'})"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port(host: str) -> int:
    """A port of an interface that is free now; ``""`` for all interfaces.

    Not of those that the kernel gives to whoever asks for any: a server binds its own half a minute later.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            if probe.connect_ex((host or "127.0.0.1", port)):
                return port
    raise RunError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on {host}")
