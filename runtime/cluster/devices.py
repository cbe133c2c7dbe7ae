"""Detects a run's devices: those of the Ray cluster that it joins, or of this machine if it starts Ray here.

The driver may be on a host without a GPU, so its own devices say nothing about the cluster that it joins.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlgraph.costs import detect
from rlgraph.costs.hardware import Cluster, Here
from rlgraph.errors import GraphError, Problem, RunError
from rlgraph.ir.plan import Plan
from rlgraph.planning.device_groups import whole_hosts
from rlgraph.runtime.cluster import ray_start
from rlgraph.runtime.cluster.failures import reason
from rlgraph.runtime.cluster.placement import device_count
from rlgraph.runtime.messages.tasks import Place
from rlgraph.units import size_text

NAMES = {"cuda": "GPUs", "cpu": "CPUs"}
ASKING = 60.0  # seconds in which hosts have to report their GPUs
WAITING = 60  # seconds, at most, until memory of processes that have ended is free
FREE = 0.9  # fraction of a device's memory that is enough, whatever the plan takes


@dataclass(frozen=True)
class Devices:
    """The devices that workers can be placed on.

    Attributes:
        where: the name of the machine or cluster in errors.
        kind: ``cuda`` or ``cpu``.
        per_host: the number of devices of each host.
        cluster: returns them as a cluster to plan for; raises a ``GraphError`` if their rates are unknown.
    """

    where: str
    kind: str
    per_host: tuple[int, ...]
    cluster: Here

    def __str__(self) -> str:
        text = f"{sum(self.per_host)} {NAMES[self.kind]}"
        return f"{text} on {len(self.per_host)} hosts" if len(self.per_host) > 1 else text


def of_machine() -> Devices:
    """Return the GPUs of this machine, or its CPU slots if it has no GPU."""
    return Devices("this machine", detect.local_device(), (detect.local_devices(),), detect.this_machine)


def of_ray(address: str) -> Devices:
    """Return the GPUs of a Ray cluster, or its CPU slots if it has no GPU: at most 4 per host.

    A task that takes no resources asks each host with GPUs what they are.

    Raises:
        RunError: the cluster can't be joined.
    """
    ray = ray_start.join(address=address)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        gpus_of_node: dict[str, int] = {}
        for node in nodes:
            gpus = device_count(node["Resources"], gpus=True)
            if gpus:
                gpus_of_node[node["NodeID"]] = gpus
        answers = _asked(ray, [*gpus_of_node]) if gpus_of_node else []
    finally:
        ray.shutdown()
    where = f"the Ray cluster at {address}"
    if gpus_of_node:
        gpus_per_host = tuple(gpus_of_node.values())
        return Devices(where, "cuda", gpus_per_host, partial(_of_answers, answers, gpus_per_host))
    resources = [node["Resources"] for node in nodes if node["Resources"].get("CPU", 0) >= 1]
    slots_per_host = tuple(device_count(host, gpus=False) for host in resources)
    least_memory = min((host.get("memory", 0.0) for host in resources), default=0.0)
    return Devices(where, "cpu", slots_per_host, partial(_of_slots, slots_per_host, least_memory))


@dataclass(frozen=True)
class Answer:
    """A host's answer about its GPUs: lines of ``nvidia-smi`` and its memory in bytes, or its problems."""

    listing: str = ""
    memory: float = 0.0
    problems: tuple[Problem, ...] = ()


def _answer() -> Answer:
    try:
        return Answer(detect.visible_listing(), detect.memory())
    except GraphError as error:  # its problems can be pickled, the error can't
        return Answer(problems=error.problems)


def _asked(ray: Any, nodes: Sequence[str]) -> list[Answer]:
    """Return the answers of the nodes that answer in time; a ``RunError`` if one lacks rlgraph."""
    ask = ray.remote(num_cpus=0)(_answer)
    pending = [ray_start.on_node(ask, node).remote() for node in nodes]
    ready, _ = ray.wait(pending, num_returns=len(pending), timeout=ASKING)
    try:
        return list(ray.get(ready))
    except Exception as error:
        raise RunError(f"a host of the Ray cluster can't say what its GPUs are\n  {reason(error)}") from error


def _of_answers(answers: Sequence[Answer], per_host: tuple[int, ...]) -> Cluster:
    for answer in answers:
        if answer.problems:
            raise GraphError(answer.problems)
    least = min((answer.memory for answer in answers), default=0.0)
    return detect.of_gpus("".join(answer.listing for answer in answers), least, per_host)


def _of_slots(slots: tuple[int, ...], host_memory: float) -> Cluster:
    fewest = min(slots, default=1)
    update = {"hosts": max(len(slots), 1), "cluster": f"auto-{len(slots)}xcpu-{fewest}"}
    return detect.of_cpu(fewest, host_memory).model_copy(update=update)


def agree(plan: Plan, devices: Devices) -> None:
    """Check that the devices are those that a plan is for.

    Raises:
        RunError: the plan is for devices of another kind, for hosts that there are not, or for more GPUs than
            this machine has.
    """
    if plan.device != devices.kind:
        planned_for = NAMES[plan.device]
        if plan.predicted:
            planned_for += f" ({plan.predicted.cluster})"
        law = f"the plan is for {planned_for}, and {devices.where} has {devices}"
        remedy = "plan for what is there, by --cluster auto, or join another cluster (--address)"
        raise RunError(f"{law}\n  {remedy}")
    for pool, hosts in whole_hosts(plan).items():
        per_host = plan.pools[pool] // hosts
        if devices.per_host.count(per_host) < hosts:
            law = f"pool {pool} takes {hosts} whole hosts of {per_host} devices (pools.{pool}.hosts), and "
            law += f"{devices.where} has hosts of {', '.join(map(str, devices.per_host))}"
            raise RunError(f"{law}\n  set pools.{pool}.devices and hosts to what is there, or hosts=null")
    planned = sum(plan.pools.values())
    # a cluster that is joined may grow until the workers are placed, a machine does not
    is_machine = devices.cluster is detect.this_machine
    if is_machine and devices.kind == "cuda" and planned > sum(devices.per_host):
        law = f"the plan takes {planned} devices, and {devices.where} has {devices}"
        raise RunError(f"{law}\n  ask for fewer with --devices, or join a Ray cluster (--address)")


def enough_memory(plan: Plan, workers: Sequence[Mapping[str, Any]]) -> None:
    """Check that every device has the memory that the plan counts on, if it was made for a cluster.

    Args:
        plan: the plan of the run.
        workers: pool, device, host and memory of each worker, as in environment.json.

    Raises:
        RunError: a device has less.
    """
    if not plan.peak or not plan.predicted:
        return
    for worker in workers:
        peak = plan.peak[worker["pool"]]
        # a driver keeps part of the memory on the data sheet; the plan's reserve covers that, too
        planned = peak.capacity - peak.parts.get("reserve", 0)
        if worker.get("memory", planned) < planned:
            law = f"the plan counts on {size_text(planned)} of each device ({plan.predicted.cluster}), and "
            law += f"{worker['pool']}[{worker['device']}] has {size_text(worker['memory'])}: "
            law += f"{worker['name']} of {worker['host']}"
            raise RunError(f"{law}\n  plan for what is there: --cluster auto, or the file of a cluster")


def wait_for_memory(
    plan: Plan,
    places: Sequence[Place],
    free: Callable[[], Sequence[tuple[int, int] | None]],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the devices have the memory that a plan takes free, or at least nine tenths of their own.

    A server that was killed gives tens of GB back within seconds. After a minute this returns anyway, and the
    loading of models reports that there is too little.

    Args:
        plan: the plan of the run.
        places: the places of the workers.
        free: asks all workers for the free and the total bytes of their devices; None on a CPU.
        sleep: waits for some seconds.
    """
    for _ in range(WAITING):
        is_free = True
        for (pool, _), memory in zip(places, free(), strict=True):
            if memory is None:
                continue
            free_bytes, total_bytes = memory
            needed = FREE * total_bytes
            if plan.peak:
                needed = min(plan.peak[pool].bytes, needed)
            is_free = is_free and free_bytes >= needed
        if is_free:
            return
        sleep(1.0)
