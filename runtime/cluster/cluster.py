"""Clusters of workers: Ray actors, or, for a debugger and for tests, objects in this process.

Both return references to results; the driver sees a value only if it asks for it by ``get``.
"""

import os
import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
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
from rlgraph.runtime.columns.chunk import Chunk
from rlgraph.runtime.columns.shared_memory import new_session, segments_of
from rlgraph.runtime.engines.weights.transports import Handover
from rlgraph.runtime.messages.errors import resume_command
from rlgraph.runtime.messages.log_level import with_level
from rlgraph.runtime.messages.tasks import ColumnRef, Place, Task, place_text
from rlgraph.runtime.worker.worker import Worker
from rlgraph.variables import hide, referred, with_values

WORKERS_END_AFTER_S, WORKERS_END_BEFORE_S = (
    1.0,
    10.0,
)  # how long workers take to end once the driver leaves Ray
RESERVE_WITHIN_S = 120.0  # at most, until the cluster has room for all workers
NUMBERS = re.compile(r"(\d+)")


def numbered(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key by which numbers in a text are sorted by value.

    Example:
        >>> sorted(["host-10", "host-9"], key=numbered)
        ['host-9', 'host-10']
    """
    key: list[tuple[bool, int, str]] = []
    for word in NUMBERS.split(text):
        is_number = word.isdigit()
        key.append((is_number, int(word) if is_number else 0, word))
    return tuple(key)


def threads_each(workers: int) -> int:
    """Return the number of threads of each worker, so that all workers together use this process's cores."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


class Value:
    """A reference in this process: the result of a call, or its error."""

    def __init__(self, result: Any = None, error: Exception | None = None) -> None:
        self.result = result
        self.error = error

    def get(self) -> Any:
        if self.error:
            raise self.error
        return self.result


class InlineCluster:
    """One worker for each pool, all in this process."""

    inline = True
    shares = False  # there is no need to: the values that a worker returns are in the memory of all

    def __init__(self, pools: Mapping[str, int]) -> None:
        assert set(pools.values()) == {1}, "in one process, each pool has one device"
        self.places = _places(pools)
        mailbox: dict[str, Handover] = {}
        # as many threads as a worker in a process has, so that sums are added up in the same order
        threads = threads_each(len(self.places))
        self.workers = {place: Worker(threads, mailbox=mailbox) for place in self.places}

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        try:
            values = [arg.get() if isinstance(arg, Value) else arg for arg in args]
            result = getattr(self.workers[place], method)(*values)
        except Exception as error:
            return [Value(error=error) for _ in range(returns)]
        if returns == 1:
            return [Value(result)]
        return [Value(item) for item in result]

    def call_off_device(
        self, plan: Plan, place: Place, tasks: Sequence[Task], *columns: Any, returns: int
    ) -> list[Any]:
        return self.call(place, "perform", tasks, (), *columns, returns=returns)

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
    places = list[Place]()
    for pool, devices in pools.items():
        places += [(pool, device) for device in range(devices)]
    return places


def perform(
    plan: Plan,
    values: Mapping[str, str],
    place: Place,
    logs: str,
    tasks: Sequence[Task],
    *columns: Chunk | ColumnRef,
) -> Any:
    """Carry out tasks that need no engine, as the worker of ``place`` would, in any process of its host.

    Ray runs this as a task on a CPU of the worker's host. Its output goes to a file in the folder ``logs``.
    """
    worker = _worker_without_engines(logs)
    worker.plan = plan
    worker.worker_place = place
    hide(values)
    return worker.perform(tasks, (), *columns)


@cache
def _worker_without_engines(logs: str) -> Worker:
    """Return the worker of this process, which has no engines."""
    return Worker(threads=1, log=f"{logs}/beside-{os.getpid()}.log", off_device=True)


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
            address: the address of the cluster to join; None to start Ray here.
            logs: the folder for the output of workers.
            timeout: seconds to wait for room (two minutes at most), and for the workers to start.
            together: for each pool, how many consecutive devices have to be on one host
                (``rlgraph.planning.device_groups.together``); 1 unless given.
            whole: pools each of whose units takes a host to itself.
            runtime_env: Ray's runtime environment (``schedule.runtime_env``).

        Raises:
            RunError: the cluster can't be joined, or has too few devices, or a worker did not start.
        """
        self.places = _places(pools)
        self.gpus = gpus
        self.logs = str(logs.resolve())
        self.workers: dict[Place, Any] = {}
        self.session = new_session()
        advice = f"continue with: {resume_command(logs.parent)}"
        self.sweeper = Sweeper(self.session, segments_of(self.session), advice)
        # for calls off the devices: the plan last put into Ray's store, references to it and to its values
        self.shared_plan: tuple[Plan, Any, Any] | None = None
        try:
            self._start_ray(address, with_level(runtime_env or {}))
            placement_units = units(pools, together or {})
            reserve_within = min(timeout, RESERVE_WITHIN_S)
            group = reserved(self.ray, placement_units, gpus, reserve_within, self.watch.check, whole)
            started = self._place(placement_units, group, logs.resolve(), timeout)
            self.workers = dict(zip(self.places, started, strict=True))
            self.shares = self._can_share(timeout)
            self.notes = self._security_notes(address, timeout)
            self.watch.started({process: place_text(at) for at, (_, process) in self.processes.items()})
        except BaseException:
            self.close()
            raise

    def _start_ray(self, address: str | None, runtime_env: Mapping[str, Any]) -> None:
        devices = len(self.places)
        options: dict[str, Any]
        if address:
            options = {"address": address}
        else:
            options = {"num_cpus": devices, "include_dashboard": False}
            if self.gpus:
                options["num_gpus"] = devices
        if runtime_env:
            options["runtime_env"] = runtime_env
        self.ray = ray_start.join(**options)
        self.watch = ProcessWatch(self.session, here=not address)
        self.sweeper.remember(self.watch.daemons)
        self.task = self.ray.remote(perform)  # made once: Ray sends each remote function to the cluster

    def _security_notes(self, address: str | None, timeout: float) -> list[str]:
        """Return a warning if Ray asks for no token."""
        asks_for_token = [worker.asks_for_token.remote() for worker in self.workers.values()]
        if all(self._answers(asks_for_token, timeout)):
            return []
        which = f"at {address}" if address else "of this run"
        meaning = "whoever reaches its ports can run code as this user, and read what the run holds"
        remedy = "docs/clusters.md says how it gets one"
        return [f"the Ray cluster {which} asks for no token: {meaning} ({remedy})"]

    def _place(
        self, placement_units: Sequence[PlacementUnit], group: Any, logs: Path, timeout: float
    ) -> list[Any]:
        """Start a worker for each place, and return them in the order of places."""
        started: list[Any] = []
        for bundle, (_, size) in enumerate(placement_units):
            for _ in range(size):
                started.append(self._worker(group, bundle, logs / f"worker-{len(started)}.log"))
        spots = self._answers([worker.place.remote() for worker in started], timeout)
        processes = self._answers([worker.process.remote() for worker in started], timeout)
        started_on = []
        for (host, address, device), (node, _) in zip(spots, processes, strict=True):
            # two hosts of one name differ in their address, and two Ray nodes on one host in their id
            started_on.append(((numbered(host), numbered(address), node), numbered(device)))
        order = seated(placement_units, started_on)
        self.processes = {place: processes[worker] for place, worker in zip(self.places, order, strict=True)}
        return [started[worker] for worker in order]

    def _worker(self, group: Any, bundle: int, log: Path) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor = self.ray.remote(Worker).options(
            num_cpus=1, num_gpus=int(self.gpus), scheduling_strategy=strategy
        )
        if self.gpus:
            return actor.remote(0, str(log), device="cuda", session=self.session)
        threads = threads_each(len(self.places))
        return actor.remote(threads, str(log), device="cpu", session=self.session)

    def _can_share(self, timeout: float) -> bool:
        """Return whether every worker can read the shared memory of every other one."""
        workers = self.workers.values()
        offers = self.put(self._answers([worker.offer.remote() for worker in workers], timeout))
        return all(self._answers([worker.can_read.remote(offers) for worker in workers], timeout))

    def _answers(self, pending: Sequence[Any], timeout: float) -> list[Any]:
        """Return the answers of workers that have just been started, all within ``timeout`` seconds."""
        _, unanswered = self._wait(pending, len(pending), timeout)
        if unanswered:
            law = f"{len(unanswered)} of the workers did not start in {timeout:.0f} s (schedule.timeout)"
            raise LostError(law, law)
        try:
            return list(self.ray.get(pending))
        except Exception as error:
            law = f"a worker did not start\n  {reason(error)}"
            if is_gone(error):
                raise LostError(law, law) from error
            raise RunError(law) from error

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        results = getattr(self.workers[place], method).options(num_returns=returns).remote(*args)
        return [results] if returns == 1 else list(results)

    def call_off_device(
        self, plan: Plan, place: Place, tasks: Sequence[Task], *columns: Any, returns: int
    ) -> list[Any]:
        if self.shared_plan is None or self.shared_plan[0] is not plan:
            values = referred(plan)
            self.shared_plan = plan, self.put(with_values(plan, values)), self.put(values)
        _, plan_reference, values_reference = self.shared_plan
        node, _ = self.processes[place]
        # on the worker's host, to read its shared memory; no CPU, as workers may take all that Ray counts
        task = ray_start.on_node(self.task, node, num_cpus=0, num_returns=returns)
        results = task.remote(plan_reference, values_reference, place, self.logs, tasks, *columns)
        return [results] if returns == 1 else list(results)

    def put(self, value: Any) -> Any:
        """Return a reference to a value; this waits for a full store as long as Ray runs."""
        return attended(partial(self.ray.put, value), self.watch.check)

    def get(self, references: Sequence[Any]) -> list[Any]:
        return list(self.ray.get(list(references)))

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return self._wait(references, 1, timeout)

    def _wait(self, references: Sequence[Any], count: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """Return what is ready, at least ``count`` unless ``timeout`` seconds pass, and what is not."""
        deadline = time.monotonic() + timeout
        while True:
            remaining_s = max(deadline - time.monotonic(), 0)
            ready, pending = self.ray.wait(
                list(references), num_returns=count, timeout=min(remaining_s, LOOK_S), fetch_local=False
            )
            if len(ready) >= count or not remaining_s:
                return ready, pending
            self.watch.check()

    def unresponsive(self) -> dict[Place, str]:
        return unresponsive(self.ray, self.processes)

    def close(self) -> None:
        self.workers = {}  # a handle must not outlive its session, as the next attempt starts another
        if hasattr(self, "ray"):
            self.watch.resume_daemons()
            # in a thread: Ray's processes block the signal that ends them, and Ray waits a second for each
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
        deadline = time.monotonic() + WORKERS_END_BEFORE_S
        time.sleep(WORKERS_END_AFTER_S)
        while self._some_worker_runs() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.sweeper.close()

    def _some_worker_runs(self) -> bool:
        return any(state(worker) not in ("", "Z") for worker in self.watch.workers)
