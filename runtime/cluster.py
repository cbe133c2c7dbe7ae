"""Where workers live: in Ray actors, or, for a debugger and for tests, in this very process.

Both give references for results; the driver never looks inside one unless it asks with ``get``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlgraph.errors import RunError
from rlgraph.runtime.worker import Worker


class Cluster(Protocol):
    """The workers of one pool, by device number."""

    size: int

    def call(self, device: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Start a worker's method; one reference a return value. References among ``args`` are followed."""
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
    """One worker, in this process."""

    size = 1

    def __init__(self) -> None:
        self.worker = Worker()

    def call(self, device: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        try:
            values = [arg.get() if isinstance(arg, Value) else arg for arg in args]
            result = getattr(self.worker, method)(*values)
        except Exception as error:
            return [Value(error=error) for _ in range(returns)]
        return [Value(result)] if returns == 1 else [Value(item) for item in result]

    def get(self, references: Sequence[Any]) -> list[Any]:
        return [reference.get() for reference in references]

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return list(references), []

    def close(self) -> None:
        self.worker.close()


class RayCluster:
    """One actor a device, in one placement group."""

    def __init__(self, devices: int, gpus: bool, address: str | None, logs: Path, timeout: float) -> None:
        """Start Ray on this machine, or join a cluster, and place a worker on each device.

        Raises:
            RunError: the cluster can't be joined, or has too few devices.
        """
        self.size = devices
        self._start_ray(devices, gpus, address)
        try:
            self._place(devices, gpus, logs.resolve(), timeout)
        except BaseException:
            self.close()
            raise

    def _start_ray(self, devices: int, gpus: bool, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self.ray = ray
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address:
            options["address"] = address
        else:
            options |= {"address": "local", "num_cpus": devices, "include_dashboard": False}
            options |= {"num_gpus": devices} if gpus else {}
        try:
            ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            remedy = "is Ray running there, and has this shell its token (RAY_AUTH_TOKEN)?" if address else ""
            raise RunError(f"no Ray cluster at {address or 'this machine'}: {error}\n  {remedy}") from error

    def _place(self, devices: int, gpus: bool, logs: Path, timeout: float) -> None:
        ray = self.ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}
        group = placement_group([bundle] * devices, strategy="PACK")
        if not group.wait(min(timeout, 120)):
            have = ray.cluster_resources()
            law = f"the cluster has no room for {devices} workers of {bundle}; it has {have}"
            raise RunError(f"{law}\n  ask for fewer with --devices, or wait until others have finished")
        actor = ray.remote(Worker)
        threads = 0 if gpus else max(1, len(os.sched_getaffinity(0)) // devices)
        workers = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote(threads, str(logs / f"worker-{index}.log"))
            for index in range(devices)
        ]
        # ranks follow (host, device), so that neighbours in rank are neighbours in wiring
        places = ray.get([worker.place.remote() for worker in workers], timeout=timeout)
        self.workers = [worker for _, _, worker in sorted(zip(places, range(devices), workers, strict=True))]

    def call(self, device: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        made = getattr(self.workers[device], method).options(num_returns=returns).remote(*args)
        return [made] if returns == 1 else list(made)

    def get(self, references: Sequence[Any]) -> list[Any]:
        return list(self.ray.get(list(references)))

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        ready, rest = self.ray.wait(list(references), num_returns=1, timeout=timeout, fetch_local=False)
        return ready, rest

    def close(self) -> None:
        self.ray.shutdown()
