"""The process of a worker: its host, its output, and its device, the one GPU that Ray has given to it."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from rlgraph.errors import RunError
from rlgraph.runtime.messages.log_level import LEVEL


class LocatedFormatter(logging.Formatter):
    """Begins each line with the time and where in the run this process is."""

    at = "before the first step"

    def format(self, record: logging.LogRecord) -> str:
        return f"{self.formatTime(record)} {record.levelname.lower()} ({self.at}) {super().format(record)}"


FORMATTER = LocatedFormatter()


class Process:
    """Reports where it runs and what it has there."""

    device: str  # ``cuda`` or ``cpu``

    def place(self) -> tuple[str, str, str]:
        """Return host, address and accelerator, by which the driver sorts workers."""
        ray = sys.modules.get("ray")  # absent when everything runs inline
        address = "127.0.0.1"
        if ray and ray.is_initialized():
            address = str(ray.util.get_node_ip_address())
        return socket.gethostname(), address, os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def environment(self) -> dict[str, Any]:
        """Return the environment of this worker.

        Raises:
            RunError: it was given a GPU, which torch does not find.
        """
        kind: dict[str, Any] = {"name": "cpu", "threads": torch.get_num_threads()}
        if self.device == "cuda":
            _check_own_gpu()
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
            kind = {"name": gpu.name, "memory": gpu.total_memory}
        return {"host": socket.gethostname(), **kind}

    def free_memory(self) -> tuple[int, int] | None:
        """Return the free bytes of the device, and all that it has; None on a CPU."""
        return torch.cuda.mem_get_info() if self.device == "cuda" else None

    def asks_for_token(self) -> bool:
        """Return whether Ray, which started this process, lets only those in who have its token."""
        return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"

    def process(self) -> tuple[str, int]:
        """Return the host, as Ray knows it, and the number of this process there."""
        import ray

        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def free_port(self) -> int:
        """Return a port of this host that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])


def redirect(log: str) -> None:
    """Send this process's output, of native code too, to a file; log lines say where in the run it is."""
    sys.stdout.flush()
    sys.stderr.flush()
    Path(log).parent.mkdir(parents=True, exist_ok=True)  # this host may be another than the driver's
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATTER)
    logging.root.addHandler(handler)
    logging.root.setLevel(os.environ.get(LEVEL, "warning").upper())


def see_own_gpu() -> None:
    """Hide the GPUs of others, which are seen where RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.

    To be called before CUDA is first used, which reads what is visible once.
    """
    import ray

    (own_gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu


def _check_own_gpu() -> None:
    """Check that torch finds the GPU of this process, which it does not where it is a build for CPUs."""
    if torch.cuda.is_available():
        return
    own_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    build = torch.version.cuda
    law = f"Ray has given GPU {own_gpu} of host {socket.gethostname()} to this worker, and torch finds none"
    if build is None:
        law += f" there: torch {torch.__version__} is a build without CUDA"
        remedy = "install a build of torch with CUDA there, or hide the GPUs from Ray (CUDA_VISIBLE_DEVICES=)"
    else:
        law += f" there: torch {torch.__version__} is built for CUDA {build}"
        remedy = "does `nvidia-smi` list it there, and is the driver new enough for this CUDA?"
    raise RunError(f"{law}\n  {remedy}")
