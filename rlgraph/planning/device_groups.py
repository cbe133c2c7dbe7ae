"""Tensor-parallel groups: consecutive devices of a pool that one server spans.

They are on one host, or all devices of as many hosts as ``hosts`` of their serve engine says, with a part of
the group each.
Devices are numbered through the pools in the plan's order, and host by host. Here hosts have 8 devices, and
the server of pool gen spans 4:

    pools {a: 6, b: 6, gen: 4}      host 0          host 1
                                    aaaaaabb        bbbbgggg
    pools {a: 6, gen: 4, b: 6}      aaaaaagg        ggbbbbbb      refused: the group reaches over two hosts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING

from rlgraph.engines.registry import serving
from rlgraph.engines.sglang_options import WITHIN
from rlgraph.errors import raise_problems
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan
from rlgraph.laws.devices import GROUP_LAWS, HOST_LAWS, devices_per_host
from rlgraph.laws.views import GroupView, HostsView

GROUPS = (1, 2, 4, 8)  # numbers of devices per server that are tried

if TYPE_CHECKING:
    from rlgraph.costs.hardware import Cluster


def has_groups(model: ModelPlan) -> bool:
    """Return whether a model's servers can span several devices of a host.

    Those that run already, or of which the graph says how their devices share, are as they are.
    """
    serve = model.serve
    if serve is None or serve.addresses:
        return False
    if not serving(serve).own_servers:
        return False
    return all(getattr(serve, key) == 1 for key in WITHIN)


def groups(plan: Plan) -> Iterator[tuple[str, ServePlan, range]]:
    """Yield each model whose servers span several devices: its name, its engine, and its pool's devices."""
    for name, model in plan.models.items():
        if model.serve and model.serve.tensor_parallel > 1:
            yield name, model.serve, plan.devices[model.serve.pool]


def sharing_sizes(plan: Plan, per_host: int) -> list[int]:
    """Return by how many devices rows may be shared, to try: devices of a host, then whole hosts."""
    sizes = [size for size in GROUPS[1:] if per_host % size == 0]
    most = max(plan.pools.values())
    size = 2 * max([per_host, *sizes])
    while size <= most:
        sizes.append(size)
        size *= 2
    return sizes


def together(plan: Plan) -> dict[str, int]:
    """Return how many consecutive devices of each pool have to be on one host: 1 where no group is."""
    sizes = dict.fromkeys(plan.pools, 1)
    for model in plan.models.values():
        if model.serve:
            pool = model.serve.pool
            sizes[pool] = lcm(sizes[pool], devices_per_host(model.serve))
    for pool, hosts in whole_hosts(plan).items():
        sizes[pool] = plan.pools[pool] // hosts
    return sizes


def whole_hosts(plan: Plan) -> dict[str, int]:
    """Return the pools that take hosts whole, and how many each of them takes."""
    if plan.origin is None:
        return {}
    hosts_of_pools = {}
    pools = plan.origin.composed.get("pools") or {}
    for name, pool in pools.items():
        hosts = pool.get("hosts") if pool else None
        if hosts:
            hosts_of_pools[name] = hosts
    return hosts_of_pools


def on_whole_hosts(plan: Plan, cluster: Cluster | None) -> Plan:
    """Return a plan whose pools can take the hosts that they ask for, of a cluster where one is given.

    Raises:
        GraphError: one can't.
    """
    group_sizes: dict[str, list[int]] = {pool: [] for pool in plan.pools}  # devices of a host per server
    for _, serve, _ in groups(plan):
        group_sizes[serve.pool].append(devices_per_host(serve))
    for pool, hosts in whole_hosts(plan).items():
        devices, sizes = plan.devices[pool], group_sizes[pool]
        view = HostsView(pool, hosts, len(devices), devices.start, sizes, cluster)
        for law in HOST_LAWS:
            raise_problems(law(view))
    return plan


def inside_hosts(plan: Plan, cluster: Cluster | None) -> None:
    """Check that no group reaches over more hosts of a cluster than it may, and that it has all of several.

    Without a cluster the hosts are of unknown size.

    Raises:
        GraphError: one does not.
    """
    for name, serve, devices in groups(plan):
        view = GroupView(name, serve, devices, cluster)
        for law in GROUP_LAWS:
            raise_problems(law(view))


def aligned(plan: Plan) -> Plan:
    """Check the groups for hosts of unknown size, and note in the plan what is assumed of these.

    Hosts are assumed to have a multiple of the group's size, as 2, 4 and 8 of hosts of 8 devices.

    Raises:
        GraphError: a group begins at another number, so that it would reach over such hosts.
    """
    inside_hosts(plan, None)
    notes = []
    for name, serve, _ in groups(plan):
        size = devices_per_host(serve)
        notes.append(f"hosts are assumed to have a multiple of {size} devices, for the servers of `{name}`")
    return replace(plan, notes=(*plan.notes, *notes))
