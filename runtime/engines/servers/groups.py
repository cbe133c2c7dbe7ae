"""Devices of a pool that one server spans, and the addresses of its servers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from rlgraph.errors import RunError

T = TypeVar("T")


def check_groups(members: Sequence[tuple[str, str]], group: int, device: str) -> None:
    """Check that each ``group`` of devices of a server is on one host, and that they are different GPUs.

    ``members`` are host and device of each worker of the pool; on CPUs devices may share cores.

    Raises:
        RunError: those of one server are not.
    """
    for start in range(0, len(members), group):
        devices_of_server = members[start : start + group]
        hosts, several = (
            {host for host, _ in devices_of_server},
            device == "cpu" or len({*devices_of_server}) == group,
        )
        if len(hosts) > 1 or not several:
            devices = ", ".join(f"{number} of {host}" for host, number in devices_of_server)
            law = f"a server spans devices {start} to {start + group - 1} of its pool (tensor_parallel), "
            law += f"and needs {group} of one host; these are {devices}"
            raise RunError(f"{law}\n  choose a tensor_parallel that divides the devices of every host")


def in_turn(index: int, servers: Sequence[T]) -> list[T]:
    """Return the servers from a device's own on: each device counts its own requests, so they begin apart."""
    start = index % len(servers)
    return [*servers[start:], *servers[:start]]


def interface(hosts: set[str]) -> str:
    """Return the address that servers of these hosts answer on."""
    if len(hosts) == 1:
        return "127.0.0.1"
    return str(sys.modules["ray"].util.get_node_ip_address())  # workers of several hosts are Ray's


def own_device(device: str, index: int) -> str:
    """Return a server's name for this process's device: a GPU's number, or as many cores as torch uses."""
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        count = torch.get_num_threads()
        cores_of_process = {cores[(index * count + each) % len(cores)] for each in range(count)}
        return ",".join(map(str, sorted(cores_of_process)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    current = torch.cuda.current_device()
    return visible[current] if current < len(visible) and visible[current] else str(current)


def meet(pool: dist.ProcessGroup | None) -> None:
    """Wait for all members of a process group: nobody uses a server while another one changes it."""
    if pool is not None and pool.size() > 1:
        dist.barrier(pool)
