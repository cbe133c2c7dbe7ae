"""Laws of devices and hosts: which devices a server's group may span, and which hosts a pool takes whole.

A group is of consecutive devices of its pool: all on one host, or all devices of as many hosts as
``serve.sglang.hosts`` says. Devices are numbered through the pools in the plan's order, and host by host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlgraph.errors import Problem
from rlgraph.ir.plan import ServePlan
from rlgraph.laws.views import GroupView, HostsView


def _hosts_share_out_devices(view: HostsView) -> Iterator[Problem]:
    """The devices of a pool that takes hosts whole are shared out among them, in whole groups."""
    per_host = view.devices // view.hosts
    is_even = view.devices % view.hosts == 0
    if is_even and all(per_host % size == 0 for size in view.group_sizes):
        return
    law = f"pool `{view.pool}` takes {view.hosts} whole hosts (pools.{view.pool}.hosts), "
    law += f"and its {view.devices} devices can't be shared out among them, in whole groups"
    remedy = f"set pools.{view.pool}.devices to a multiple of {view.hosts}, or pools.{view.pool}.hosts=null"
    yield Problem("whole-hosts", law, None, (), remedy)


def _hosts_begin_with_pool(view: HostsView) -> Iterator[Problem]:
    """A pool that takes hosts whole has all devices of each, and begins with a host."""
    cluster = view.cluster
    if cluster is None:
        return
    per_host = view.devices // view.hosts
    if per_host == cluster.devices and view.start % cluster.devices == 0:
        return
    law = f"pool `{view.pool}` takes {view.hosts} whole hosts (pools.{view.pool}.hosts), "
    law += f"{per_host} devices each from device {view.start} on; "
    law += f"hosts of {cluster.cluster} have {cluster.devices} devices"
    remedy = f"set pools.{view.pool}.devices={view.hosts * cluster.devices}, before pools of parts of hosts, "
    remedy += f"or pools.{view.pool}.hosts=null"
    yield Problem("whole-hosts", law, None, (), remedy)


HOST_LAWS: tuple[Callable[[HostsView], Iterator[Problem]], ...] = (
    _hosts_share_out_devices,
    _hosts_begin_with_pool,
)


def devices_per_host(serve: ServePlan) -> int:
    """Return how many devices of one host a server spans."""
    return serve.tensor_parallel // serve.hosts


def _several_hosts_are_whole(view: GroupView) -> Iterator[Problem]:
    cluster, serve = view.cluster, view.serve
    if cluster is None or serve.hosts == 1:
        return
    size = devices_per_host(serve)
    if size == cluster.devices:
        return
    law = f"a group of {_group_text(view)} has {size} devices of each host, and {cluster.cluster} has hosts "
    law += "of "
    law += f"{cluster.devices}: a server over several hosts takes whole ones"
    size_path = serve.setting_name(view.name, "tensor_parallel")
    hosts_path = serve.setting_name(view.name, "hosts")
    remedy = f"set {size_path}={serve.hosts * cluster.devices}, or leave out {hosts_path}"
    yield Problem("tensor-parallel", law, None, (), remedy)


def _group_stays_on_host(view: GroupView) -> Iterator[Problem]:
    cluster = view.cluster
    if cluster is None:
        return
    size = devices_per_host(view.serve)
    for start in view.devices[::size]:
        end = start + size - 1
        host, end_host = start // cluster.devices, end // cluster.devices
        if host != end_host:
            law = f"devices {start} to {end}, a group of {_group_text(view)}, reach over "
            law += f"hosts {host} and {end_host} of {cluster.cluster}, "
            law += f"which have {cluster.devices} devices each"
            yield Problem("tensor-parallel", law, None, (), _group_remedy(view, cluster.devices))
            return


def _group_begins_at_multiple(view: GroupView) -> Iterator[Problem]:
    """Take hosts of unknown size to have a multiple of the group's size."""
    size = devices_per_host(view.serve)
    if view.cluster is not None or view.devices.start % size == 0:
        return
    law = f"groups of {_group_text(view)} begin at device {view.devices.start}, and where "
    law += f"hosts end at multiples of {size} they reach over two of them"
    remedy = f"{_group_remedy(view)}, or give --cluster, which says how many devices a host has"
    yield Problem("tensor-parallel", law, None, (), remedy)


GROUP_LAWS: tuple[Callable[[GroupView], Iterator[Problem]], ...] = (
    _several_hosts_are_whole,
    _group_stays_on_host,
    _group_begins_at_multiple,
)


def _group_text(view: GroupView) -> str:
    hosts = f", hosts: {view.serve.hosts}" if view.serve.hosts > 1 else ""
    return f"`{view.name}` (tensor_parallel: {view.serve.tensor_parallel}{hosts})"


def _group_remedy(view: GroupView, per_host: int = 0) -> str:
    size = devices_per_host(view.serve)
    if 0 < per_host < size and size % per_host == 0:
        hosts = size // per_host
        path = view.serve.setting_name(view.name, "hosts")
        return f"set {path}={hosts}: a server over several hosts takes whole ones"
    remedy = f"put pools before it whose devices are together a multiple of {size}, or none"
    if per_host % size:
        remedy = f"choose a tensor_parallel that divides {per_host}, and {remedy}"
    return remedy
