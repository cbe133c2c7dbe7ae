"""Placement of workers: pools fill hosts in the plan's order, and tensor-parallel groups stay on one host.

Here two hosts have 8 GPUs each, and the servers of pool gen span 4 devices, so that these 4 are one unit:

    pools {a: 6, b: 6, gen: 4}      host-1      a0 a1 a2 a3 a4 a5 b0 b1
                                    host-2      b2 b3 b4 b5 gen0 gen1 gen2 gen3
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rlgraph.costs.detect import SLOTS
from rlgraph.errors import RunError

PlacementUnit = tuple[str, int]  # a pool, and how many of its devices are together on one host
NODE_ID = "ray.io/node-id"  # the label by which Ray places a bundle on one host


def units(pools: Mapping[str, int], together: Mapping[str, int]) -> list[PlacementUnit]:
    """Return the units of all pools in the plan's order, from the arguments of ``RayCluster``.

    Example:
        >>> units({"train": 2, "gen": 8}, {"gen": 4})
        [('train', 1), ('train', 1), ('gen', 4), ('gen', 4)]
    """
    result: list[PlacementUnit] = []
    for pool, devices in pools.items():
        size = together.get(pool, 1)
        result += [(pool, size)] * (devices // size)
    return result


def seated(placement_units: Sequence[PlacementUnit], started_on: Sequence[tuple[Any, Any]]) -> list[int]:
    """Return the number of the worker that takes each place, pools in the plan's order.

    Within a pool, places are ordered by (host, device), both sortable. ``started_on`` has these two for each
    worker. Workers were started unit by unit, and those of one unit are on one host.
    """
    workers_of: dict[Any, list[int]] = defaultdict(list)  # by host, ordered by device
    for worker in sorted(range(len(started_on)), key=lambda worker: started_on[worker]):
        host, _ = started_on[worker]
        workers_of[host].append(worker)

    sizes = [size for _, size in placement_units]
    hosts = filled(sizes, {host: len(workers) for host, workers in workers_of.items()})
    if hosts is None:
        # no order of filling fits what Ray chose: keep each unit where its first worker was started
        hosts = []
        first_worker = 0
        for size in sizes:
            hosts.append(started_on[first_worker][0])
            first_worker += size

    workers_of_pool: dict[str, list[int]] = defaultdict(list)
    for (pool, size), host in zip(placement_units, hosts, strict=True):
        workers_of_pool[pool] += workers_of[host][:size]
        del workers_of[host][:size]
    order: list[int] = []
    for workers in workers_of_pool.values():
        order += sorted(workers, key=lambda worker: started_on[worker])
    return order


def filled(sizes: Sequence[int], room: Mapping[Any, int]) -> list[Any] | None:
    """Return the first host with room for each unit, taking units in their order, or else the largest first.

    ``sizes`` are the devices of each unit, ``room`` the free devices of each host. None if neither order
    finds room for all units.

    Example:
        >>> filled([1, 1, 2], {"one": 2, "two": 2}), filled([1, 1, 2, 2], {"one": 3, "two": 3})
        (['one', 'one', 'two'], ['one', 'two', 'one', 'two'])
    """
    largest_first = sorted(range(len(sizes)), key=lambda unit: -sizes[unit])
    for order in (range(len(sizes)), largest_first):
        host_of_unit = _first_fit(order, sizes, room)
        if host_of_unit is not None:
            return [host_of_unit[unit] for unit in range(len(sizes))]
    return None


def _first_fit(order: Sequence[int], sizes: Sequence[int], room: Mapping[Any, int]) -> dict[int, Any] | None:
    free = dict(room)
    host_of_unit: dict[int, Any] = {}
    for unit in order:
        host = next((host for host, devices in free.items() if devices >= sizes[unit]), None)
        if host is None:
            return None
        free[host] -= sizes[unit]
        host_of_unit[unit] = host
    return host_of_unit


def device_count(resources: Mapping[str, float], gpus: bool) -> int:
    """Return how many devices a host has by its resources: its GPUs, or at most 4 of its CPUs."""
    if gpus:
        return int(resources.get("GPU", 0))
    return min(int(resources.get("CPU", 0)), SLOTS)


def own_hosts(
    placement_units: Sequence[PlacementUnit],
    whole: Collection[str],
    devices: Mapping[str, int],
    free: Collection[str],
) -> list[dict[str, str]]:
    """Return the node label that each unit asks for: units of pools in ``whole`` get a host to themselves.

    Such a host has exactly as many devices as the unit; a host in ``free`` is preferred. ``devices`` has the
    device count of each host by Ray's node id.

    Example:
        >>> own_hosts([("main", 4), ("a", 1), ("main", 4)], {"main"}, {"x": 4, "y": 8, "z": 4}, {"z"})
        [{'ray.io/node-id': 'z'}, {}, {'ray.io/node-id': 'x'}]
    """
    candidates = sorted(devices, key=lambda host: host not in free)
    labels: list[dict[str, str]] = []
    for pool, size in placement_units:
        if pool not in whole:
            labels.append({})
            continue
        # Ray finds no host of the id "none", and the wait for the placement group says so
        host = next((host for host in candidates if devices[host] == size), "none")
        labels.append({NODE_ID: host})
        candidates = [candidate for candidate in candidates if candidate != host]
    return labels


def reserved(
    ray: Any,
    placement_units: Sequence[PlacementUnit],
    gpus: bool,
    timeout: float,
    check: Callable[[], None],
    whole: Collection[str] = (),
) -> Any:
    """Return a placement group over all pools with a bundle for each unit; a device is a GPU or a CPU.

    Args:
        ray: the module, joined to the cluster.
        placement_units: the units of all pools.
        gpus: whether a device is a GPU, otherwise a CPU.
        timeout: seconds to wait for room.
        check: called every second of the wait; it raises if waiting has become pointless.
        whole: pools each of whose units takes a host to itself.

    Raises:
        RunError: the cluster has no room within ``timeout`` seconds.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    kinds = ("CPU", "GPU") if gpus else ("CPU",)
    labels: list[dict[str, str]] = [{} for _ in placement_units]
    if whole:
        labels = _labels(ray, placement_units, gpus, kinds, whole)
    bundles = [dict.fromkeys(kinds, float(size)) for _, size in placement_units]
    group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
    for _ in range(math.ceil(timeout)):
        if group.wait(1):
            return group
        check()
    remove_placement_group(group)
    raise RunError(_no_room(ray, placement_units, kinds, timeout, whole))


def _no_room(
    ray: Any,
    placement_units: Sequence[PlacementUnit],
    kinds: Sequence[str],
    timeout: float,
    whole: Collection[str],
) -> str:
    """Return the error text: what was asked for, and what the cluster has."""
    devices_of_pool = Counter[str]()
    for pool, size in placement_units:
        devices_of_pool[pool] += size
    requested = ", ".join(f"{pool} {devices}" for pool, devices in devices_of_pool.items())
    for pool, size in dict(placement_units).items():
        if pool in whole:
            requested += f", those of {pool} by {size} on a host of its own"
        elif size > 1:
            requested += f", those of {pool} by {size} on one host"
    each = "a GPU and a CPU" if "GPU" in kinds else "a CPU"
    law = f"the cluster has no room for {devices_of_pool.total()} workers with {each} each ({requested}): "
    law += f"waited {timeout:.0f} s, and it has {_hosts(ray, kinds)}"
    return f"{law}\n  ask for fewer with --devices, or wait until others have finished"


def _labels(
    ray: Any,
    placement_units: Sequence[PlacementUnit],
    gpus: bool,
    kinds: Sequence[str],
    whole: Collection[str],
) -> list[dict[str, str]]:
    """Return the node label that each unit asks for, preferring hosts on which nothing runs."""
    from ray._private.state import available_resources_per_node

    total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    available = available_resources_per_node()
    free = []
    for host, resources in total.items():
        unused = available.get(host, {})
        if all(unused.get(kind) == resources.get(kind) for kind in kinds):
            free.append(host)
    devices = {host: device_count(resources, gpus) for host, resources in total.items()}
    return own_hosts(placement_units, whole, devices, free)


def _hosts(ray: Any, kinds: Sequence[str]) -> str:
    """Return the resources of every host as text, and what is free on all of them together."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    hosts = [f"{node['NodeManagerAddress']}: {_counts(node['Resources'], kinds)}" for node in nodes]
    return f"{'; '.join(hosts)}; free of all are {_counts(ray.available_resources(), kinds)}"


def _counts(resources: Mapping[str, float], kinds: Sequence[str]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in reversed(kinds))
