"""A server for each tensor-parallel group of a pool: its first device leads, the others speak to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.runtime.serve.sglang.engine import SglangEngine


def sglang_engine(
    path: str, *, device: str, group: int, pool: dist.ProcessGroup, logs: Path, **options: Any
) -> SglangEngine:
    """This device's engine: with a server where it leads a group, else with the address of its leader.

    Collective over the pool. Groups are of consecutive devices: the compiler has checked that they fill the
    pool and stay within a host.

    Args:
        path: a model directory or a hub name.
        device: ``cpu`` or ``cuda``.
        group: devices of one server.
        pool: the process group of the pool.
        logs: where the servers' logs go.
        options: as ``SglangEngine`` takes them.
    """
    index = pool.rank()
    members = _gathered(_own_device(device, index), pool)
    first = index - index % group
    options |= {"device": device, "group": group, "devices": members[first : first + group]}
    options |= {"logs": logs, "pool": pool}
    engine = SglangEngine(path, **options) if index == first else None
    addresses = _gathered(engine.address if engine else None, pool)
    return engine or SglangEngine(path, **options, leader=addresses[first])


def _own_device(device: str, index: int) -> str:
    """What a server calls the device of this process: a GPU's number, or a core."""
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        return str(cores[index % len(cores)])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    current = torch.cuda.current_device()
    return visible[current] if current < len(visible) and visible[current] else str(current)


def _gathered(item: Any, pool: dist.ProcessGroup) -> list[Any]:
    found = [None] * pool.size()
    dist.all_gather_object(found, item, group=pool)
    return found
