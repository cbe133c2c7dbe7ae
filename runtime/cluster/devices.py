"""Detects a run's devices: those of the Ray cluster that it joins, or of this machine where it starts Ray.

The driver may be on a host without a GPU; what it has itself says nothing of the cluster that it joins.
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
ASKING = 60.0  # seconds in which hosts have to say what their GPUs are
WAITING = 60  # seconds, at most, for memory that processes held which have ended
FREE = 0.9  # fraction of a device's memory


@dataclass(frozen=True)
class Devices:
    """The devices that workers can be placed on.

    Attributes:
        where: where they are, for errors.
        kind: ``cuda`` or ``cpu``.
        per_host: how many each host has.
        cluster: returns them as a cluster to plan for; raises a ``GraphError`` where their rates are unknown.
    """

    where: str
    kind: str
    per_host: tuple[int, ...]
    cluster: Here

    def __str__(self) -> str:
        hosts = f" on {len(self.per_host)} hosts" if len(self.per_host) > 1 else ""
        return f"{sum(self.per_host)} {NAMES[self.kind]}{hosts}"


def of_machine() -> Devices:
    """Return the GPUs of this machine, or, where it has none, its CPU slots."""
    return Devices("this machine", detect.local_device(), (detect.local_devices(),), detect.this_machine)


def of_ray(address: str) -> Devices:
    """Return the GPUs of a Ray cluster, or, where it has none, its CPU slots: at most 4 per host.

    Each host with GPUs is asked what they are, by a task that takes no resources.

    Raises:
        RunError: the cluster can't be joined.
    """
    ray = ray_start.join(address=address)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        counts = {node["NodeID"]: device_count(node["Resources"], gpus=True) for node in nodes}
        gpus = {node: count for node, count in counts.items() if count}
        where, per_host = f"the Ray cluster at {address}", tuple(gpus.values())
        if gpus:
            return Devices(where, "cuda", per_host, partial(_of_answers, _asked(ray, [*gpus]), per_host))
        resources = [node["Resources"] for node in nodes if node["Resources"].get("CPU", 0) >= 1]
    finally:
        ray.shutdown()
    slots = tuple(device_count(host, gpus=False) for host in resources)
    least = min((host.get("memory", 0.0) for host in resources), default=0.0)
    return Devices(where, "cpu", slots, partial(_of_slots, slots, least))


@dataclass(frozen=True)
class Answer:
    """A host's answer about its GPUs: lines of ``nvidia-smi``, its memory in bytes, or why it can't say."""

    listing: str = ""
    memory: float = 0.0
    problems: tuple[Problem, ...] = ()


def _answer() -> Answer:
    try:
        return Answer(detect.visible_listing(), detect.memory())
    except GraphError as error:  # its problems can be pickled, the error can't
        return Answer(problems=error.problems)


def _asked(ray: Any, nodes: Sequence[str]) -> list[Answer]:
    """Return the answer of each node that answers in time; a ``RunError`` where rlgraph is not installed."""
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
    each = min(slots, default=1)
    hosts = {"hosts": max(len(slots), 1), "cluster": f"auto-{len(slots)}xcpu-{each}"}
    return detect.of_cpu(each, host_memory).model_copy(update=hosts)


def agree(plan: Plan, devices: Devices) -> None:
    """Check that a plan is for the devices that there are.

    Raises:
        RunError: it is for devices of another kind, or for more than this machine has GPUs.
    """
    if plan.device != devices.kind:
        cluster = f" ({plan.predicted.cluster})" if plan.predicted else ""
        law = f"the plan is for {NAMES[plan.device]}{cluster}, and {devices.where} has {devices}"
        remedy = "plan for what is there, by --cluster auto, or join another cluster (--address)"
        raise RunError(f"{law}\n  {remedy}")
    for pool, hosts in whole_hosts(plan).items():
        each = plan.pools[pool] // hosts
        if devices.per_host.count(each) < hosts:
            law = f"pool {pool} takes {hosts} whole hosts of {each} devices (pools.{pool}.hosts), and "
            law += f"{devices.where} has hosts of {', '.join(map(str, devices.per_host))}"
            raise RunError(f"{law}\n  set pools.{pool}.devices and hosts to what is there, or hosts=null")
    count = sum(plan.pools.values())
    if devices.cluster is detect.this_machine and devices.kind == "cuda" and count > sum(devices.per_host):
        law = f"the plan takes {count} devices, and {devices.where} has {devices}"
        raise RunError(f"{law}\n  ask for fewer with --devices, or join a Ray cluster (--address)")


def enough_memory(plan: Plan, on: Sequence[Mapping[str, Any]]) -> None:
    """Check that every device has the memory that the plan counts on; one for no cluster counts on none.

    Raises:
        RunError: a device has less, by what each worker is ``on``, as environment.json has it.
    """
    for worker in on if plan.peak and plan.predicted else ():
        peak = plan.peak[worker["pool"]]
        # the driver keeps some of what a data sheet says; the plan's reserve is for that too
        counted = peak.capacity - peak.parts.get("reserve", 0)
        if worker.get("memory", counted) < counted:
            law = f"the plan counts on {size_text(counted)} of each device ({plan.predicted.cluster}), and "
            law += f"{worker['pool']}[{worker['device']}] has {size_text(worker['memory'])}: "
            law += f"{worker['name']} of {worker['host']}"
            raise RunError(f"{law}\n  plan for what is there: --cluster auto, or the file of a cluster")


def wait_for_memory(
    plan: Plan,
    places: Sequence[Place],
    free: Callable[[], Sequence[tuple[int, int] | None]],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the devices have the memory that a plan takes, or at least nine tenths of their own.

    A server that was killed gives tens of GB back within seconds. After a minute it is left to the loading of
    models to say that there is too little. ``free`` asks all workers for the bytes that are free on their
    devices, and for those that these have; None on a CPU.
    """
    for _ in range(WAITING):
        frees = [(pool, *memory) for (pool, _), memory in zip(places, free(), strict=True) if memory]
        needs = [min(plan.peak[pool].bytes if plan.peak else whole, FREE * whole) for pool, _, whole in frees]
        if all(left >= need for (_, left, _), need in zip(frees, needs, strict=True)):
            return
        sleep(1.0)
