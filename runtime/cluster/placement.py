"""Placement of workers: pools fill hosts in the plan's order, with tensor-parallel groups whole.

Here two hosts have 8 GPUs, and the servers of pool gen span 4 devices, so that these 4 are one unit:

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


def units(pools: Mapping[str, int], together: Mapping[str, int]) -> list[PlacementUnit]:
    """Return the units of all pools in the plan's order, from the arguments of ``RayCluster``.

    Example:
        >>> units({"train": 2, "gen": 8}, {"gen": 4})
        [('train', 1), ('train', 1), ('gen', 4), ('gen', 4)]
    """
    sizes = {pool: together.get(pool, 1) for pool in pools}
    return [(pool, sizes[pool]) for pool, devices in pools.items() for _ in range(devices // sizes[pool])]


def seated(parts: Sequence[PlacementUnit], started_on: Sequence[tuple[Any, Any]]) -> list[int]:
    """Return for every place, pools in the plan's order, the number of the worker that takes it.

    Within a pool places are in the order of (host, device), both sortable, on which each worker was started:
    for one unit after the other, each unit's on one host.
    """
    hosts: dict[Any, list[int]] = defaultdict(list)
    for worker in sorted(range(len(started_on)), key=lambda worker: started_on[worker]):
        hosts[started_on[worker][0]].append(worker)
    firsts = [sum(size for _, size in parts[:number]) for number in range(len(parts))]
    taken = filled([size for _, size in parts], {host: len(free) for host, free in hosts.items()})
    pools: dict[str, list[int]] = defaultdict(list)
    for (pool, size), host in zip(parts, taken or [started_on[first][0] for first in firsts], strict=True):
        pools[pool] += hosts[host][:size]
        del hosts[host][:size]
    return [worker for held in pools.values() for worker in sorted(held, key=lambda one: started_on[one])]


def filled(sizes: Sequence[int], room: Mapping[Any, int]) -> list[Any] | None:
    """Return the host of each unit: the first that has room, in the units' order or the largest first.

    None where neither order finds room for all.

    Example:
        >>> filled([1, 1, 2], {"one": 2, "two": 2}), filled([1, 1, 2, 2], {"one": 3, "two": 3})
        (['one', 'one', 'two'], ['one', 'two', 'one', 'two'])
    """
    orders = [range(len(sizes)), sorted(range(len(sizes)), key=lambda unit: -sizes[unit])]
    for order in orders:
        left, taken = dict(room), {}
        for unit in order:
            host = next((host for host, free in left.items() if free >= sizes[unit]), None)
            if host is None:
                break
            left[host] -= sizes[unit]
            taken[unit] = host
        else:
            return [taken[unit] for unit in range(len(sizes))]
    return None


def device_count(resources: Mapping[str, float], gpus: bool) -> int:
    """Return how many devices a host has, of its resources: GPUs, or at most 4 of its CPUs."""
    return int(resources.get("GPU", 0)) if gpus else min(int(resources.get("CPU", 0)), SLOTS)


def own_hosts(
    parts: Sequence[PlacementUnit], whole: Collection[str], devices: Mapping[str, int], free: Collection[str]
) -> list[dict[str, str]]:
    """Return the labels of the host that each unit asks for: one of its own for those of pools in ``whole``.

    That is one with as many devices as the unit has, a ``free`` one if possible. ``devices`` are those of
    each host, by Ray's name of it.

    Example:
        >>> own_hosts([("main", 4), ("a", 1), ("main", 4)], {"main"}, {"x": 4, "y": 8, "z": 4}, {"z"})
        [{'ray.io/node-id': 'z'}, {}, {'ray.io/node-id': 'x'}]
    """
    left = sorted(devices, key=lambda host: host not in free)
    labels: list[dict[str, str]] = []
    for pool, size in parts:
        host = next((host for host in left if devices[host] == size), "none") if pool in whole else ""
        labels.append({"ray.io/node-id": host} if host else {})
        left = [other for other in left if other != host]
    return labels


def reserved(
    ray: Any,
    parts: Sequence[PlacementUnit],
    gpus: bool,
    timeout: float,
    check: Callable[[], None],
    whole: Collection[str] = (),
) -> Any:
    """Return a placement group over all pools, with a bundle for each unit; a device is a GPU or a CPU.

    Units of pools in ``whole`` are hosts. ``check`` is called while it waits, and raises where there is
    nothing to wait for any more.

    Raises:
        RunError: the cluster that the module ``ray`` is joined to has no room in ``timeout`` seconds.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    kinds = ("CPU", "GPU") if gpus else ("CPU",)
    labels = _labels(ray, parts, gpus, kinds, whole) if whole else [{} for _ in parts]
    bundles = [dict.fromkeys(kinds, float(size)) for _, size in parts]
    group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
    for _ in range(math.ceil(timeout)):
        if group.wait(1):
            return group
        check()
    remove_placement_group(group)
    pools = Counter[str]()
    for pool, size in parts:
        pools[pool] += size
    wanted = ", ".join(f"{pool} {devices}" for pool, devices in pools.items())
    several = {pool: size for pool, size in parts if size > 1 or pool in whole}
    groups = "".join(
        f", those of {pool} by {size} on {'a host of its own' if pool in whole else 'one host'}"
        for pool, size in several.items()
    )
    each = "a GPU and a CPU" if gpus else "a CPU"
    law = f"the cluster has no room for {pools.total()} workers with {each} each ({wanted}{groups}): "
    law += f"waited {timeout:.0f} s, and it has {_hosts(ray, kinds)}"
    raise RunError(f"{law}\n  ask for fewer with --devices, or wait until others have finished")


def _labels(
    ray: Any, parts: Sequence[PlacementUnit], gpus: bool, kinds: Sequence[str], whole: Collection[str]
) -> list[dict[str, str]]:
    """Return the host of the cluster that each unit has to be on, as a label; free ones come first."""
    from ray._private.state import available_resources_per_node

    hosts = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    left = defaultdict(dict, available_resources_per_node())
    free = [host for host, has in hosts.items() if all(left[host].get(k) == has.get(k) for k in kinds)]
    devices = {host: device_count(has, gpus) for host, has in hosts.items()}
    return own_hosts(parts, whole, devices, free)


def _hosts(ray: Any, kinds: Sequence[str]) -> str:
    """Return the resources of every host, and what of all of them is free."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    hosts = [f"{node['NodeManagerAddress']}: {_counts(node['Resources'], kinds)}" for node in nodes]
    return f"{'; '.join(hosts)}; free of all are {_counts(ray.available_resources(), kinds)}"


def _counts(resources: Mapping[str, float], kinds: Sequence[str]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in reversed(kinds))
