"""Where workers live: in Ray actors, or, for a debugger and for tests, in this very process.

Both give references for results; the driver never looks inside one unless it asks with ``get``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlgraph.errors import RunError
from rlgraph.plan import Plan
from rlgraph.runtime import beside
from rlgraph.runtime.failure import LostError, is_gone, reason
from rlgraph.runtime.tasks import Task
from rlgraph.runtime.weights import Handover
from rlgraph.runtime.worker import Worker

SPLIT = re.compile(r"(\d+)")
Place = tuple[str, int]  # a pool, and a device's number in it


def place_text(place: Place) -> str:
    """As plans write it: ``gen[1]``."""
    return f"{place[0]}[{place[1]}]"


def numbered(text: str) -> tuple[tuple[bool, int, str], ...]:
    """A key that sorts numbers in a text by what they are.

    Example:
        >>> sorted(["host-10", "host-9"], key=numbered)
        ['host-9', 'host-10']
    """
    return tuple((word.isdigit(), int(word) if word.isdigit() else 0, word) for word in SPLIT.split(text))


def threads_each(workers: int) -> int:
    """Of the cores of this process, those that each of some workers has which compute on them."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


class Cluster(Protocol):
    """The workers of all pools."""

    places: Sequence[Place]  # pools in the plan's order, and their devices
    inline: bool  # whether a call is done, in this process, when it returns
    lends: bool  # whether workers can read each other's memory

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Start a worker's method; one reference a return value. References among ``args`` are followed."""
        ...

    def beside(self, plan: Plan, place: Place, tasks: Sequence[Task], *parts: Any, returns: int) -> list[Any]:
        """Start tasks that need no engine beside a worker; references as of its ``perform``."""
        ...

    def get(self, references: Sequence[Any]) -> list[Any]:
        """The values of references."""
        ...

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Those that are ready, at least one unless ``timeout`` seconds pass, and the rest."""
        ...

    def close(self) -> None:
        """End every process that this started."""
        ...


class Value:
    """A reference in this process: a result, or the error that a call ended in."""

    def __init__(self, result: Any = None, error: Exception | None = None) -> None:
        self.result, self.error = result, error

    def get(self) -> Any:
        if self.error:
            raise self.error
        return self.result


class InlineCluster:
    """One worker for each pool, all in this process."""

    inline = True
    lends = False  # what one returns is there for all

    def __init__(self, pools: Mapping[str, int]) -> None:
        assert set(pools.values()) == {1}, "in one process, each pool has one device"
        self.places = _places(pools)
        desk: dict[str, Handover] = {}
        # as many threads as each has as a process of its own: sums are added up in the same order
        threads = threads_each(len(self.places))
        self.workers = {place: Worker(threads, desk=desk) for place in self.places}

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        try:
            values = [arg.get() if isinstance(arg, Value) else arg for arg in args]
            result = getattr(self.workers[place], method)(*values)
        except Exception as error:
            return [Value(error=error) for _ in range(returns)]
        return [Value(result)] if returns == 1 else [Value(item) for item in result]

    def beside(self, plan: Plan, place: Place, tasks: Sequence[Task], *parts: Any, returns: int) -> list[Any]:
        return self.call(place, "perform", tasks, (), *parts, returns=returns)

    def get(self, references: Sequence[Any]) -> list[Any]:
        return [reference.get() for reference in references]

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return list(references), []

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def _places(pools: Mapping[str, int]) -> list[Place]:
    return [(pool, device) for pool, devices in pools.items() for device in range(devices)]


class RayCluster:
    """One actor a device, in one placement group a pool."""

    inline = False

    def __init__(
        self, pools: Mapping[str, int], gpus: bool, address: str | None, logs: Path, timeout: float
    ) -> None:
        """Start Ray on this machine, or join a cluster, and place a worker on each device.

        Raises:
            RunError: the cluster can't be joined, or has too few devices.
        """
        self.places, self.gpus, self.logs = _places(pools), gpus, str(logs.resolve())
        self.given: tuple[Plan, Any] | None = None  # what tasks beside workers get: the plan, its reference
        self._start_ray(address)
        try:
            self.workers = dict(zip(self.places, self._place(pools, logs.resolve(), timeout), strict=True))
            self.lends = self._lends(timeout)
            nodes = self._answers([worker.node.remote() for worker in self.workers.values()], "", timeout)
            self.nodes = dict(zip(self.places, nodes, strict=True))
        except BaseException:
            self.close()
            raise

    def _start_ray(self, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # the memory of a column is free for the next at once, not up to a second later
        os.environ.setdefault("RAY_free_objects_batch_size", "1")
        # malloc asks for huge pages: columns are copied faster from worker to worker, 170 ms to 205 a GiB
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        # a process that was beside the devices stays for the next iteration
        os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "600000")
        import ray

        self.ray, devices = ray, len(self.places)
        self.task = ray.remote(beside.perform)  # once: each one that is made is sent to the cluster anew
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address:
            options["address"] = address
        else:
            options |= {"address": "local", "num_cpus": devices, "include_dashboard": False}
            options |= {"num_gpus": devices} if self.gpus else {}
        try:
            ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            remedy = "is Ray running there, and has this shell its token (RAY_AUTH_TOKEN)?" if address else ""
            raise RunError(f"no Ray cluster at {address or 'this machine'}: {error}\n  {remedy}") from error

    def _place(self, pools: Mapping[str, int], logs: Path, timeout: float) -> list[Any]:
        """A worker for each place; within a pool in the order of (host, device)."""
        started: dict[str, list[Any]] = {}
        for pool, group in self._groups(pools, min(timeout, 120)).items():
            first = sum(map(len, started.values()))
            names = [logs / f"worker-{first + index}.log" for index in range(pools[pool])]
            started[pool] = [self._worker(group, index, log) for index, log in enumerate(names)]
        return [worker for pool in pools for worker in self._sorted(pool, started[pool], timeout)]

    def _groups(self, pools: Mapping[str, int], timeout: float) -> dict[str, Any]:
        """A placement group for each pool."""
        from ray.util.placement_group import placement_group

        bundle = {"CPU": 1.0, "GPU": 1.0} if self.gpus else {"CPU": 1.0}
        groups = {pool: placement_group([bundle] * size, strategy="PACK") for pool, size in pools.items()}
        for pool, group in groups.items():
            if not group.wait(timeout):
                have = self.ray.cluster_resources()
                law = f"the cluster has no room for {pools[pool]} workers of {bundle}"
                law += (f" in pool {pool}" if len(pools) > 1 else "") + f"; it has {have}"
                raise RunError(f"{law}\n  ask for fewer with --devices, or wait until others have finished")
        return groups

    def _worker(self, group: Any, index: int, log: Path) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        threads = 0 if self.gpus else threads_each(len(self.places))
        bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        actor = self.ray.remote(Worker)
        gpus = 1 if self.gpus else 0
        return actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=bundle).remote(threads, str(log))

    def _sorted(self, pool: str, workers: list[Any], timeout: float) -> list[Any]:
        """Workers by (host, device), so that neighbours in rank are neighbours in wiring."""
        places = self._answers([worker.place.remote() for worker in workers], f" of pool {pool}", timeout)
        keys = [tuple(map(numbered, place)) for place in places]
        return [workers[index] for index in sorted(range(len(workers)), key=keys.__getitem__)]

    def _lends(self, timeout: float) -> bool:
        workers = self.workers.values()
        offers = self._answers([worker.offer.remote() for worker in workers], "", timeout)
        return all(self._answers([worker.can_read.remote(offers) for worker in workers], "", timeout))

    def _answers(self, pending: Sequence[Any], of: str, timeout: float) -> list[Any]:
        """What workers say that have just been started.

        Args:
            pending: a reference each.
            of: which workers they are, for the error.
            timeout: seconds to wait for all of them.

        Raises:
            RunError: some did not start in time, or at all.
            LostError: one of them is gone.
        """
        _, late = self.ray.wait(pending, num_returns=len(pending), timeout=timeout)
        if late:
            law = f"{len(late)} of the workers{of} did not start in {timeout:.0f} s"
            raise RunError(f"{law} (schedule.timeout)")
        try:
            return list(self.ray.get(pending))
        except Exception as error:
            law = f"a worker{of} did not start\n  {reason(error)}"
            raise (LostError(law, law) if is_gone(error) else RunError(law)) from error

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        made = getattr(self.workers[place], method).options(num_returns=returns).remote(*args)
        return [made] if returns == 1 else list(made)

    def beside(self, plan: Plan, place: Place, tasks: Sequence[Task], *parts: Any, returns: int) -> list[Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.given is None or self.given[0] is not plan:
            self.given = plan, self.ray.put(plan)
        # where it can read what its worker lends; on one machine workers have all CPUs that Ray counts
        here = NodeAffinitySchedulingStrategy(self.nodes[place], soft=False)
        task = self.task.options(num_cpus=0, num_returns=returns, scheduling_strategy=here)
        made = task.remote(self.given[1], place, self.logs, tasks, *parts)
        return [made] if returns == 1 else list(made)

    def get(self, references: Sequence[Any]) -> list[Any]:
        return list(self.ray.get(list(references)))

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        ready, rest = self.ray.wait(list(references), num_returns=1, timeout=timeout, fetch_local=False)
        return ready, rest

    def close(self) -> None:
        self.ray.shutdown()
