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


def host_bytes(footprint: Footprint, pool: str) -> Counter[str]:
    """Return the bytes of each part that a device of a pool has in host memory all the time.

    An optimizer on the host has float32 masters and two averages, and room for the gradients and the weights
    of two buckets on their way. Activations are those of the largest micro-batch of an update, whose memory
    is not freed before the next.
    """
    parts: Counter[str] = Counter()
    if footprint.cluster.device == "cpu":
        return parts  # its own memory is the host's
    for name, model in footprint.plan.models.items():
        train, size = model.train, footprint.sizes.get(name)
        if train is None or size is None:
            continue
        if train.pool != pool or not train.optimizer_offload:
            continue
        mesh = footprint.plan.meshes[name]
        size = part_of(size, mesh.tensor)
        trained = trained_on_device(size, model, mesh.shard)
        largest = max(limits.BUCKET // MASTER, max(size.numbers) // mesh.shard)
        bucket = min(trained, largest) * (MASTER + WIDTH[train.dtype])
        parts["optimizer"] += 3 * MASTER * trained + 2 * bucket
    activations = 0
    for step in footprint.on(pool, footprint.plan.steps):
        if step.updated:
            activations = max(activations, footprint.micro_batch(step).on_host)
    parts["activations"] = activations
    return parts


def buffer_bytes(plan: Plan, work: Workload) -> dict[str, float]:
    """Return node -> the bytes of the rows that it holds, all there may be, of mean length; of texts none.

    A region that streams, called as its filter, has as much as may be begun and not used.
    """
    sizes: dict[str, float] = {}
    for node, function in plan.functions["train"].items():
        if function.holds:
            columns = [function.outs[name] for name in function.holds]
            sizes[node] = _row_bytes(plan, work, columns) * function.value("capacity", 0)
    for step in plan.steps:
        if isinstance(step.action, Collect):
            region = plan.regions[step.region]
            if region.streams:
                sizes[step.region] = _row_bytes(plan, work, step.reads) * region.max_rows_in_flight
    return sizes


def _row_bytes(plan: Plan, work: Workload, columns: Iterable[str]) -> float:
    """Return the bytes of a row of mean length in some columns of the training steps."""
    total = 0.0
    for name in columns:
        column = plan.columns["train"][name]
        cell = column.type.cell_bytes(column.sizes, column.stored) or 0  # none for a text
        cells = work.mean if column.type.axis else 1
        total += cell * cells
    return total


def _fullest(footprint: Footprint) -> tuple[int, list[str]]:
    """Return the most bytes that one host has to hold, and the pools whose devices they leave."""
    plan, per_host = footprint.plan, footprint.cluster.devices
    bytes_per_device = {pool: _leaving_bytes(footprint, pool) for pool in plan.pools}
    rows = _rows_by_device(footprint)
    hosts = []
    for start in range(0, sum(plan.pools.values()), per_host):
        stop = start + per_host
        by_pool: dict[str, int] = {}
        for pool, nbytes in bytes_per_device.items():
            span = plan.devices[pool]
            devices_on_host = min(span.stop, stop) - max(span.start, start)
            if nbytes and devices_on_host > 0:
                by_pool[pool] = nbytes * devices_on_host
        row_bytes = sum(nbytes for device, nbytes in rows if start <= device < stop)
        total = sum(by_pool.values()) + int(row_bytes)
        hosts.append((total, [*by_pool]))
    return max(hosts)


def _leaving_bytes(footprint: Footprint, pool: str) -> int:
    """Return the bytes of a device of a pool that are on its host, some of the time or all of it.

    A serve engine drops what leaves its device, so that nothing of it is on the host.
    """
    plan = footprint.plan
    moved: set[tuple[str, str]] = set()  # models and parts
    for step in (*plan.steps, *plan.eval_steps):
        if isinstance(step.action, MoveEngine):
            moved |= {(step.action.model, part) for part in step.action.parts}
    total = host_bytes(footprint, pool).total()
    for item, size in footprint.items(pool).items():
        is_moved = (item.model, item.name) in moved
        if item.engine == "train" and is_moved:
            total += size
    return total


def _rows_by_device(footprint: Footprint) -> list[tuple[int, float]]:
    """Return the bytes of rows that nodes hold, each with the first device of the node's pool."""
    plan = footprint.plan
    sizes = buffer_bytes(plan, footprint.work)
    rows = []
    for step in plan.steps:
        if step.node in sizes:
            rows.append((plan.devices[step.pool].start, sizes[step.node]))
    return rows


def _holds(footprint: Footprint) -> bool:
    capacity = footprint.cluster.host_memory
    if capacity is None:
        return True
    most, _ = _fullest(footprint)
    return most <= capacity
