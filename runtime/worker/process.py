"""The process of a worker: its host, its device and its output."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from rlgraph.runtime.worker.own_gpu import check_own_gpu


class Process:
    """Reports where it runs and what it has there."""

    device: str  # ``cuda`` or ``cpu``

    def place(self) -> tuple[str, str, str]:
        """Return host, address and accelerator, by which the driver sorts workers."""
        return socket.gethostname(), _address(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def environment(self) -> dict[str, Any]:
        """Return the environment of this worker.

        Raises:
            RunError: it was given a GPU, which torch does not find.
        """
        if self.device == "cuda":
            check_own_gpu()
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
            kind: dict[str, Any] = {"name": gpu.name, "memory": gpu.total_memory}
        else:
            kind = {"name": "cpu", "threads": torch.get_num_threads()}
        return {"host": socket.gethostname(), **kind}

    def free_memory(self) -> tuple[int, int] | None:
        """Return the free bytes of the device, and all that it has; None on a CPU."""
        return torch.cuda.mem_get_info() if self.device == "cuda" else None

    def node(self) -> str:
        """Return the host, as Ray knows it."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def free_port(self) -> int:
        """Return a port of this host that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])


def _address() -> str:
    ray = sys.modules.get("ray")  # absent when everything runs inline
    return str(ray.util.get_node_ip_address()) if ray and ray.is_initialized() else "127.0.0.1"


def redirect(log: str) -> None:
    """Send this process's output, of native code too, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    Path(log).parent.mkdir(parents=True, exist_ok=True)  # on another host than the driver's
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
