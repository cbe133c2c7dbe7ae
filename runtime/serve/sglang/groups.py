"""A server for each tensor-parallel group of a pool, or servers that run already: who looks after which."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.runtime.serve.sglang.client import Client
from rlgraph.runtime.serve.sglang.engine import SglangEngine


def sglang_engine(
    path: str,
    *,
    device: str,
    group: int,
    pool: dist.ProcessGroup,
    logs: Path,
    addresses: Sequence[str] = (),
    **options: Any,
) -> SglangEngine:
    """This device's engine, which sends requests to all servers of the pool. Collective over the pool.

    Groups are of consecutive devices: the compiler has checked that they fill the pool and stay within a
    host. The first of each starts a server. Where servers run already, the pool's first device syncs them.

    Args:
        path: a model directory or a hub name.
        device: ``cpu`` or ``cuda``.
        group: devices of one server.
        pool: the process group of the pool.
        logs: where the servers' logs go.
        addresses: of servers that run already.
        options: as ``SglangEngine`` takes them.
    """
    index = pool.rank()
    options |= {"device": device, "pool": pool}
    if addresses:
        key = os.environ.get("SGLANG_API_KEY", "")
        servers = _from(index, [Client(address.rstrip("/"), key) for address in addresses])
        return SglangEngine(path, **options, servers=servers, leads=index == 0)
    members = _gathered((socket.gethostname(), _own_device(device, index)), pool)
    first = index - index % group
    options |= {"group": group, "devices": [device for _, device in members[first : first + group]]}
    options |= {"logs": logs, "host": _interface({host for host, _ in members})}
    engine = SglangEngine(path, **options, leads=index == first)
    led = _gathered(engine.keeper.client if index == first else None, pool)
    engine.reach(_from(index // group, [client for client in led if client]))
    return engine


def _from(index: int, servers: Sequence[Client]) -> list[Client]:
    """The servers in turn, from a device's own on: each counts its own requests, so they begin apart."""
    at = index % len(servers)
    return [*servers[at:], *servers[:at]]


def _interface(hosts: set[str]) -> str:
    """The address that servers of these hosts answer on."""
    if len(hosts) == 1:
        return "127.0.0.1"
    return str(sys.modules["ray"].util.get_node_ip_address())  # workers of several hosts are Ray's


def _own_device(device: str, index: int) -> str:
    """What a server calls the device of this process: a GPU's number, or as many cores as torch uses here."""
    if device == "cpu":
        cores, count = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
        own = {cores[(index * count + each) % len(cores)] for each in range(count)}
        return ",".join(map(str, sorted(own)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    current = torch.cuda.current_device()
    return visible[current] if current < len(visible) and visible[current] else str(current)


def _gathered(item: Any, pool: dist.ProcessGroup) -> list[Any]:
    found = [None] * pool.size()
    dist.all_gather_object(found, item, group=pool)
    return found
