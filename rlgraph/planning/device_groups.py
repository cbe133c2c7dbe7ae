"""Tensor-parallel groups: consecutive devices of a pool that one server spans.

They are on one host, or all devices of as many hosts as ``serve.hosts`` says, with a part of the group each.
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

from rlgraph.costs.hardware import Cluster
from rlgraph.engines.registry import serving
from rlgraph.engines.sglang_options import WITHIN
from rlgraph.errors import fail
from rlgraph.ir.mesh import devices_of
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan

GROUPS = (1, 2, 4, 8)  # numbers of devices per server that are tried


def has_groups(model: ModelPlan) -> bool:
    """Return whether a model's servers can span several devices of a host.

    Those that run already, or of which the graph says how their devices share, are as they are.
    """
    serve = model.serve
    own = bool(serve and serving(serve).own_servers and not serve.addresses)
    return own and all(getattr(serve, key) == 1 for key in WITHIN)


def groups(plan: Plan) -> Iterator[tuple[str, ServePlan, range]]:
    """Yield each model whose servers span several devices: its name, its engine, and its pool's devices."""
    for name, model in plan.models.items():
        if model.serve and model.serve.tensor_parallel > 1:
            yield name, model.serve, devices_of(plan, model.serve.pool)


def part(serve: ServePlan) -> int:
    """Return how many devices of one host a server spans."""
    return serve.tensor_parallel // serve.hosts


def sharing_sizes(plan: Plan, per_host: int) -> list[int]:
    """Return by how many devices rows may be shared, to try: devices of a host, then whole hosts."""
    sizes, most = [size for size in GROUPS[1:] if per_host % size == 0], max(plan.pools.values())
    while (size := 2 * max([per_host, *sizes])) <= most:
        sizes.append(size)
    return sizes


def together(plan: Plan) -> dict[str, int]:
    """Return how many consecutive devices of each pool have to be on one host: 1 where no group is."""
    sizes = dict.fromkeys(plan.pools, 1)
    for model in plan.models.values():
        if model.serve:
            pool = model.serve.pool
            sizes[pool] = lcm(sizes[pool], part(model.serve))
    return sizes | {pool: plan.pools[pool] // hosts for pool, hosts in whole_hosts(plan).items()}


def whole_hosts(plan: Plan) -> dict[str, int]:
    """Return the pools that take hosts whole, and how many each of them takes."""
    pools = (plan.origin.composed.get("pools") or {}) if plan.origin else {}
    return {name: pool["hosts"] for name, pool in pools.items() if pool and pool.get("hosts")}


def on_whole_hosts(plan: Plan, cluster: Cluster | None) -> Plan:
    """Return a plan whose pools can take the hosts that they ask for, of a cluster where one is given.

    Raises:
        GraphError: one can't.
    """
    for pool, hosts in whole_hosts(plan).items():
        count, at = plan.pools[pool], f"pools.{pool}"
        law, remedy = f"pool `{pool}` takes {hosts} whole hosts ({at}.hosts)", f"or {at}.hosts=null"
        parts = [part(serve) for _, serve, _ in groups(plan) if serve.pool == pool]
        if count % hosts or any(count // hosts % size for size in parts):
            law += f", and its {count} devices can't be shared out among them, in whole groups"
            remedy = f"set {at}.devices to a multiple of {hosts}, {remedy}"
            raise fail("whole-hosts", law, None, remedy=remedy)
        first = devices_of(plan, pool).start
        if cluster and (count // hosts != cluster.devices or first % cluster.devices):
            law += f", {count // hosts} devices each from device {first} on; hosts of {cluster.cluster} have "
            law += f"{cluster.devices} devices"
            remedy = f"set {at}.devices={hosts * cluster.devices}, before pools of parts of hosts, {remedy}"
            raise fail("whole-hosts", law, None, remedy=remedy)
    return plan


def inside_hosts(plan: Plan, cluster: Cluster) -> None:
    """Check that no group reaches over more hosts of a cluster than it may, and that it has all of several.

    Raises:
        GraphError: one does not.
    """
    for name, serve, devices in groups(plan):
        size, group = part(serve), _text(name, serve)
        if serve.hosts > 1 and size != cluster.devices:
            law = f"a group of {group} has {size} devices of each host, and {cluster.cluster} has hosts of "
            law += f"{cluster.devices}: a server over several hosts takes whole ones"
            whole, at = serve.hosts * cluster.devices, f"models.{name}.serve"
            remedy = f"set {at}.tensor_parallel={whole}, or leave out {at}.hosts"
            raise fail("tensor-parallel", law, None, remedy=remedy)
        for first in devices[::size]:
            host, last = first // cluster.devices, first + size - 1
            if last // cluster.devices != host:
                law = f"devices {first} to {last}, a group of {group}, reach over "
                law += f"hosts {host} and {last // cluster.devices} of {cluster.cluster}, "
                law += f"which have {cluster.devices} devices each"
                raise fail("tensor-parallel", law, None, remedy=_remedy(name, serve, cluster.devices))


def aligned(plan: Plan) -> Plan:
    """Check the groups for hosts of unknown size, and note in the plan what is assumed of these.

    Hosts are assumed to have a multiple of the group's size, as 2, 4 and 8 of hosts of 8 devices.

    Raises:
        GraphError: a group begins at another number, so that it would reach over such hosts.
    """
    notes = []
    for name, serve, devices in groups(plan):
        size = part(serve)
        if devices.start % size:
            law = f"groups of {_text(name, serve)} begin at device {devices.start}, and where "
            law += f"hosts end at multiples of {size} they reach over two of them"
            remedy = f"{_remedy(name, serve)}, or give --cluster, which says how many devices a host has"
            raise fail("tensor-parallel", law, None, remedy=remedy)
        notes.append(f"hosts are assumed to have a multiple of {size} devices, for the servers of `{name}`")
    return replace(plan, notes=(*plan.notes, *notes))


def _text(name: str, serve: ServePlan) -> str:
    hosts = f", hosts: {serve.hosts}" if serve.hosts > 1 else ""
    return f"`{name}` (tensor_parallel: {serve.tensor_parallel}{hosts})"


def _remedy(name: str, serve: ServePlan, host: int = 0) -> str:
    size = part(serve)
    if 0 < host < size and size % host == 0:
        return f"set models.{name}.serve.hosts={size // host}: a server over several hosts takes whole ones"
    divisor = f"choose a tensor_parallel that divides {host}, and " if host % size else ""
    return f"{divisor}put pools before it whose devices are together a multiple of {size}, or none"
