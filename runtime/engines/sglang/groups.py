"""Starts a server per tensor-parallel group of a pool, or connects to running ones."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlgraph.runtime.engines.memory.allocator import release
from rlgraph.runtime.engines.metric_sums import of_ranks
from rlgraph.runtime.engines.servers.groups import check_groups, in_turn, interface, own_device
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.engines.sglang.hosts import Starts
from rlgraph.runtime.engines.sglang.supervisor import Remotes, SglangSupervisor
from rlgraph.runtime.engines.sglang.weights import ServerRanks
from rlgraph.runtime.engines.weights.transfer import FOREVER


def sglang_engine(
    path: str,
    *,
    device: str,
    group: int,
    pool: dist.ProcessGroup,
    logs: Path,
    addresses: Sequence[str] = (),
    hosts: int = 1,
    expert_parallel: int = 1,
    attention_replicas: int = 1,
    **options: Any,
) -> SglangEngine:
    """Return this device's engine, which sends requests to all servers of the pool. Collective.

    Groups are of consecutive devices. The first of each starts a server, and where it spans several hosts,
    the first on each of the others follows. Where servers run already, the pool's first device syncs them.

    Arguments are as ``SglangEngine`` takes them: ``group`` counts the devices of one server, ``hosts`` the
    hosts that they are on, and ``addresses`` are those of servers that run already. Experts are dealt out to
    ``expert_parallel`` devices; each of ``attention_replicas`` holds its share of the cache.

    Raises:
        RunError: the devices of a group on a host are on several, or two of them are the same GPU.
    """
    index = pool.rank()
    options |= {"device": device, "pool": pool}
    if addresses:
        return SglangEngine(
            path, **options, servers=in_turn(index, Client.of_addresses(addresses)), leads=index == 0
        )
    shared = {"ep_size": expert_parallel, "attn_dp_size": attention_replicas}
    shared = {name: count for name, count in shared.items() if count > 1}
    if shared:
        options["options"] = {**options.get("options", {}), **shared}
        options["max_cached_tokens"] //= attention_replicas
    release(device)  # the server that starts beside this worker, once all have met, needs it
    members = of_ranks((socket.gethostname(), own_device(device, index)), pool)
    devices_per_host = group // hosts
    check_groups(members, devices_per_host, device)
    first_of_server = index - index % group
    first_of_host = index - index % devices_per_host
    options |= {
        "group": group,
        "devices": [device for _, device in members[first_of_host : first_of_host + devices_per_host]],
    }
    host = interface({host for host, _ in members})
    options |= {"logs": logs, "host": host}
    if hosts > 1:
        starts = Starts(hosts, 0, host) if index == first_of_server else None
        addresses_of_starts = of_ranks(starts and (starts.address, starts.port), pool)
        if index == first_of_host != first_of_server:  # the first worker on a further host of this server
            address, port = addresses_of_starts[first_of_server]
            starts = Starts(hosts, (first_of_host - first_of_server) // devices_per_host, address, port)
        options |= {"starts": starts, "keeps": False}
    engine = SglangEngine(
        path, **options, leads=index == first_of_server, ranks=_ranks(pool, first_of_server, group)
    )
    client = engine.supervisor.client if isinstance(engine.supervisor, SglangSupervisor) else None
    clients = [client for client in of_ranks(client, pool) if client]
    engine.reach(in_turn(index // group, clients))
    return engine


def sender(addresses: Sequence[str], device: str, transport: str, folder: str | None) -> Remotes:
    """Return what brings weights from a worker that trains to servers that run already."""
    return Remotes(Client.of_addresses(addresses), device, transport, folder)


def _ranks(pool: dist.ProcessGroup, start: int, size: int) -> ServerRanks | None:
    """Return the workers of one server, who meet over their hosts' CPUs; None of one worker alone."""
    if size == 1:
        return None
    ranks = dist.get_process_group_ranks(pool)[start : start + size]
    # members wait for their leader, who may restart a server
    return ServerRanks(dist.new_group(ranks, timeout=FOREVER, backend="gloo", use_local_synchronization=True))
