"""Clusters of workers: in Ray actors, or, for a debugger and for tests, in this very process.

Both give references for results; the driver never looks inside one unless it asks with ``get``.
"""

import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan
from rlgraph.runtime.cluster import ray_start
from rlgraph.runtime.cluster.failures import LostError, is_gone, reason
from rlgraph.runtime.cluster.liveness import LOOK_S, ProcessWatch, attended, state, unresponsive
from rlgraph.runtime.cluster.placement import PlacementUnit, reserved, seated, units
from rlgraph.runtime.cluster.sweeper import Sweeper
from rlgraph.runtime.columns.part import Part
from rlgraph.runtime.columns.shared_memory import new_session, segments_of
from rlgraph.runtime.engines.weights.transports import Handover
from rlgraph.runtime.messages.log_level import with_level
from rlgraph.runtime.messages.tasks import ColumnRef, Place, Task, place_text
from rlgraph.runtime.worker.worker import Worker
from rlgraph.variables import hide, referred, with_values

LEAVING_S, LEFT_S = 1.0, 10.0  # at least and at most, until workers have ended as the driver leaves Ray
SPLIT = re.compile(r"(\d+)")


def numbered(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a key that sorts numbers in a text by value.

    Example:
        >>> sorted(["host-10", "host-9"], key=numbered)
        ['host-9', 'host-10']
    """
    return tuple((word.isdigit(), int(word) if word.isdigit() else 0, word) for word in SPLIT.split(text))


def threads_each(workers: int) -> int:
    """Return how many of this process's cores each of some workers computes on."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


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
    shares = False  # what one returns is there for all

    def __init__(self, pools: Mapping[str, int]) -> None:
        assert set(pools.values()) == {1}, "in one process, each pool has one device"
        self.places = _places(pools)
        mailbox: dict[str, Handover] = {}
        # each has as many threads as a process of its own: sums are added up in the same order
        threads = threads_each(len(self.places))
        self.workers = {place: Worker(threads, mailbox=mailbox) for place in self.places}

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        try:
            values = [arg.get() if isinstance(arg, Value) else arg for arg in args]
            result = getattr(self.workers[place], method)(*values)
        except Exception as error:
            return [Value(error=error) for _ in range(returns)]
        return [Value(result)] if returns == 1 else [Value(item) for item in result]

    def beside(self, plan: Plan, place: Place, tasks: Sequence[Task], *parts: Any, returns: int) -> list[Any]:
        return self.call(place, "perform", tasks, (), *parts, returns=returns)

    def put(self, value: Any) -> Any:
        return Value(value)

    def get(self, references: Sequence[Any]) -> list[Any]:
        return [reference.get() for reference in references]

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return list(references), []

    def unresponsive(self) -> dict[Place, str]:
        return {}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def _places(pools: Mapping[str, int]) -> list[Place]:
    return [(pool, device) for pool, devices in pools.items() for device in range(devices)]


def perform(
    plan: Plan,
    values: Mapping[str, str],
    place: Place,
    logs: str,
    tasks: Sequence[Task],
    *parts: Part | ColumnRef,
) -> Any:
    """Carry out tasks that need no engine, as ``Worker.perform`` of ``place``, in whichever process this is.

    In Ray that is a task on a CPU of the worker's host; what it prints goes to a file in the folder ``logs``.
    """
    worker = _worker_beside(logs)
    worker.plan, worker.at = plan, place
    hide(values)
    return worker.perform(tasks, (), *parts)


@cache
def _worker_beside(logs: str) -> Worker:
    """Return the worker of this process."""
    return Worker(threads=1, log=f"{logs}/beside-{os.getpid()}.log", beside=True)


class RayCluster:
    """One actor per device, all of them in one placement group."""

    inline = False

    def __init__(
        self,
        pools: Mapping[str, int],
        gpus: bool,
        address: str | None,
        logs: Path,
        timeout: float,
        together: Mapping[str, int] | None = None,
        whole: Collection[str] = (),
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        """Start Ray on this machine, or join a cluster, and place a worker on each device.

        Args:
            pools: devices of each pool, in the plan's order.
            gpus: whether a device is a GPU; otherwise it is a CPU.
            address: of a cluster to join; None: Ray is started here.
            logs: the folder for what workers print.
            timeout: seconds to wait for room, at most two minutes of them, and for the workers to start.
            together: of each pool, how many consecutive devices have to be on one host, as of
                ``rlgraph.planning.device_groups.together``; 1 unless given.
            whole: pools in which these have that host to themselves.
            runtime_env: as ``schedule.runtime_env``.

        Raises:
            RunError: the cluster can't be joined, or has too few devices, or a worker did not start.
        """
        self.places, self.gpus, self.logs = _places(pools), gpus, str(logs.resolve())
        self.session = new_session()
        advice = f"continue with --resume --run-dir {logs.parent}"
        self.sweeper = Sweeper(self.session, segments_of(self.session), advice)
        # the plan that tasks beside workers get, and the variables that it refers to
        self.planned: tuple[Plan, Any, Any] | None = None
        try:
            self._start_ray(address, with_level(runtime_env or {}))
            parts = units(pools, together or {})
            group = reserved(self.ray, parts, gpus, min(timeout, 120), self.watch.check, whole)
            started = self._place(parts, group, logs.resolve(), timeout)
            self.workers = dict(zip(self.places, started, strict=True))
            self.shares = self._shares(timeout)
            self.notes = [*self._open(address, timeout)]
            self.watch.started({process: place_text(at) for at, (_, process) in self.processes.items()})
        except BaseException:
            self.close()
            raise

    def _start_ray(self, address: str | None, runtime_env: Mapping[str, Any]) -> None:
        devices = len(self.places)
        options: dict[str, Any] = {"num_cpus": devices, "include_dashboard": False}
        options |= {"num_gpus": devices} if self.gpus else {}
        options = {"address": address} if address else options
        self.ray = ray_start.join(**options, **({"runtime_env": runtime_env} if runtime_env else {}))
        self.watch = ProcessWatch(self.session, here=not address)
        self.sweeper.remember(self.watch.daemons)
        self.task = self.ray.remote(perform)  # made once: each one is sent to the cluster anew

    def _open(self, address: str | None, timeout: float) -> Iterator[str]:
        """Yield what it means where Ray asks for no token."""
        if not all(self._answers([w.asks_for_token.remote() for w in self.workers.values()], timeout)):
            law = f"the Ray cluster {f'at {address}' if address else 'of this run'} asks for no token"
            means = "whoever reaches its ports can run code as this user, and read what the run holds"
            yield f"{law}: {means} (docs/clusters.md says how it gets one)"

    def _place(self, parts: Sequence[PlacementUnit], group: Any, logs: Path, timeout: float) -> list[Any]:
        """Start a worker for each place; within a pool in the order of (host, device)."""
        bundles = [bundle for bundle, (_, size) in enumerate(parts) for _ in range(size)]
        started = [self._worker(group, at, logs / f"worker-{n}.log") for n, at in enumerate(bundles)]
        spots = self._answers([worker.place.remote() for worker in started], timeout)
        processes = self._answers([worker.process.remote() for worker in started], timeout)
        where = [
            ((numbered(host), numbered(address), node), numbered(device))
            for (host, address, device), (node, _) in zip(spots, processes, strict=True)
        ]
        order = seated(parts, where)
        self.processes = {at: processes[worker] for at, worker in zip(self.places, order, strict=True)}
        return [started[worker] for worker in order]

    def _worker(self, group: Any, bundle: int, log: Path) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        threads, device = (0, "cuda") if self.gpus else (threads_each(len(self.places)), "cpu")
        options = {"num_cpus": 1, "num_gpus": int(self.gpus)}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor = self.ray.remote(Worker).options(**options, scheduling_strategy=strategy)
        return actor.remote(threads, str(log), device=device, session=self.session)

    def _shares(self, timeout: float) -> bool:
        workers = self.workers.values()
        offers = self.put(self._answers([worker.offer.remote() for worker in workers], timeout))
        return all(self._answers([worker.can_read.remote(offers) for worker in workers], timeout))

    def _answers(self, pending: Sequence[Any], timeout: float) -> list[Any]:
        """Return the answers of workers that have just been started, within ``timeout`` seconds in all."""
        _, late = self._wait(pending, len(pending), timeout)
        if late:
            law = f"{len(late)} of the workers did not start in {timeout:.0f} s (schedule.timeout)"
            raise LostError(law, law)
        try:
            return list(self.ray.get(pending))
        except Exception as error:
            law = f"a worker did not start\n  {reason(error)}"
            raise (LostError(law, law) if is_gone(error) else RunError(law)) from error

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        results = getattr(self.workers[place], method).options(num_returns=returns).remote(*args)
        return [results] if returns == 1 else list(results)

    def beside(self, plan: Plan, place: Place, tasks: Sequence[Task], *parts: Any, returns: int) -> list[Any]:
        if self.planned is None or self.planned[0] is not plan:
            values = referred(plan)
            self.planned = plan, self.put(with_values(plan, values)), self.put(values)
        # it can read there what its worker shares; on one machine workers have all CPUs that Ray counts
        task = ray_start.on_node(self.task, self.processes[place][0], num_cpus=0, num_returns=returns)
        results = task.remote(*self.planned[1:], place, self.logs, tasks, *parts)
        return [results] if returns == 1 else list(results)

    def put(self, value: Any) -> Any:
        """Return a reference to a value; a store that does not take it is waited for as long as Ray runs."""
        return attended(partial(self.ray.put, value), self.watch.check)

    def get(self, references: Sequence[Any]) -> list[Any]:
        return list(self.ray.get(list(references)))

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return self._wait(references, 1, timeout)

    def _wait(self, references: Sequence[Any], count: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """Return those that are ready, at least ``count`` unless ``timeout`` seconds pass, and the rest."""
        end = time.monotonic() + timeout
        while True:
            left = max(end - time.monotonic(), 0)
            how = {"num_returns": count, "timeout": min(left, LOOK_S), "fetch_local": False}
            ready, rest = self.ray.wait(list(references), **how)
            if len(ready) >= count or not left:
                return ready, rest
            self.watch.check()

    def unresponsive(self) -> dict[Place, str]:
        return unresponsive(self.ray, self.processes)

    def close(self) -> None:
        self.workers: dict[Place, Any] = {}  # no handle outlives its session into that of the next attempt
        if hasattr(self, "ray"):
            self.watch.go_on()
            # Ray's processes block the signal by which it ends them, and it would wait a second for each
            sweeping = threading.Thread(target=self._sweep)
            sweeping.start()
            try:
                self.ray.shutdown()
            finally:
                sweeping.join()
        else:
            self.sweeper.close()

    def _sweep(self) -> None:
        """End Ray's processes once its workers have ended, which they do when this process has left Ray."""
        end = time.monotonic() + LEFT_S
        time.sleep(LEAVING_S)
        while any(state(worker) not in ("", "Z") for worker in self.watch.workers) and time.monotonic() < end:
            time.sleep(0.1)
        self.sweeper.close()
