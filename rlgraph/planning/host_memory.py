"""Memory of hosts: what leaves their devices, and what train engines keep there all the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rlgraph.costs import limits
from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.lora_size import trained_on_device
from rlgraph.costs.memory import Footprint
from rlgraph.costs.plan_size import part_of
from rlgraph.costs.workload import Workload
from rlgraph.errors import fail
from rlgraph.ir.actions import Collect, MoveEngine
from rlgraph.ir.plan import Plan
from rlgraph.units import size_text


def fits(footprint: Footprint) -> bool:
    """Return whether the devices and the hosts hold a plan."""
    return all(peak.fits for peak in footprint.peaks().values()) and _holds(footprint)


def hosts_hold(footprint: Footprint) -> None:
    """Check that what leaves the devices fits into a host's memory.

    Raises:
        GraphError: it does not.
    """
    if _holds(footprint):
        return
    (most, pools), cluster = _fullest(footprint), footprint.cluster
    law = f"{footprint.plan.graph} does not fit on {cluster.cluster}: what leaves the devices of pool "
    law += f"{' and '.join(pools)} takes {size_text(most)} of a host, "
    law += f"which has {size_text(cluster.host_memory or 0)}"
    remedy = "more devices, so that less has to leave; or change host_memory in the cluster's file"
    raise fail("does-not-fit", law, None, remedy=remedy)


def kept_on_host(footprint: Footprint, pool: str) -> Counter[str]:
    """Return the bytes of each part that a device of a pool has in host memory all the time.

    An optimizer on the host has float32 masters and two averages, and room for the gradients and the weights
    of two buckets on their way. Activations are those of the largest micro-batch of an update, whose memory
    is kept for the next.
    """
    kept: Counter[str] = Counter()
    if footprint.cluster.device == "cpu":
        return kept  # its own memory is the host's
    for name, model in footprint.plan.models.items():
        train, size = model.train, footprint.sizes.get(name)
        if train and size and train.pool == pool and train.optimizer_offload:
            mesh = footprint.plan.meshes[name]
            size = part_of(size, mesh.tensor)
            trained = trained_on_device(size, model, mesh.shard)
            largest = max(limits.BUCKET // MASTER, max(size.numbers) // mesh.shard)
            kept["optimizer"] += 3 * MASTER * trained
            kept["optimizer"] += 2 * min(trained, largest) * (MASTER + WIDTH[train.dtype])
    updates = [step for step in footprint.on(pool, footprint.plan.steps) if step.updated]
    kept["activations"] = max((footprint.micro_batch(step).on_host for step in updates), default=0)
    return kept


def held_bytes(plan: Plan, work: Workload) -> dict[str, float]:
    """Return the bytes of the rows that a node holds, all there may be, of mean length; of texts none.

    A region that streams, called as its filter, has as much as may be begun and not used.
    """
    columns = plan.columns["train"]
    held = dict[str, float]()

    def row(names: Iterable[str]) -> float:
        total = 0.0
        for name in names:
            column = columns[name]
            cells = work.mean if column.type.axis else 1
            total += (column.type.cell_bytes(column.sizes, column.stored) or 0) * cells
        return total

    for node, function in plan.functions["train"].items():
        if function.holds:
            held_columns = (function.outs[name] for name in function.holds)
            held[node] = row(held_columns) * function.value("capacity", 0)
    for step in plan.steps:
        if isinstance(step.action, Collect) and plan.regions[step.region].streams:
            held[step.region] = row(step.reads) * plan.regions[step.region].max_rows_in_flight
    return held


def _fullest(footprint: Footprint) -> tuple[int, list[str]]:
    """Return the most bytes that one host has to hold, and the pools whose devices they leave."""
    plan, per_host = footprint.plan, footprint.cluster.devices
    moved = set[tuple[str, str]]()
    for step in (*plan.steps, *plan.eval_steps):
        if isinstance(step.action, MoveEngine):
            moved |= {(step.action.model, part) for part in step.action.parts}
    each = dict.fromkeys(plan.pools, 0)  # bytes of a device
    for pool in plan.pools:
        for item, size in footprint.items(pool).items():
            if item.engine == "train" and (item.model, item.part) in moved:
                each[pool] += size
        each[pool] += kept_on_host(footprint, pool).total()
    rows = _rows_by_device(footprint)
    hosts = []
    for start in range(0, sum(plan.pools.values()), per_host):
        stop = start + per_host
        of_pool: dict[str, int] = {}
        for pool, size in each.items():
            span = plan.devices[pool]
            count = min(span.stop, stop) - max(span.start, start)
            if size and count > 0:
                of_pool[pool] = size * count
        row_bytes = sum(size for device, size in rows if start <= device < stop)
        hosts.append((sum(of_pool.values()) + int(row_bytes), [*of_pool]))
    return max(hosts)


def _rows_by_device(footprint: Footprint) -> list[tuple[int, float]]:
    """Return the bytes of rows that nodes hold, each with the first device of the node's pool."""
    plan = footprint.plan
    sizes = held_bytes(plan, footprint.work)
    return [(plan.devices[step.pool].start, sizes[step.node]) for step in plan.steps if step.node in sizes]


def _holds(footprint: Footprint) -> bool:
    capacity = footprint.cluster.host_memory
    if capacity is None:
        return True
    most, _ = _fullest(footprint)
    return most <= capacity
