"""Joins a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import os
from typing import Any

from rlgraph.errors import RunError

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # the memory of a column is free for the next at once, not up to a second later
    "RAY_free_objects_batch_size": "1",
    # malloc asks for huge pages: columns are copied faster from worker to worker, 170 ms to 205 a GiB
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # a process that was beside the devices stays for the next iteration
    "RAY_idle_worker_killing_time_threshold_ms": "600000",
}


def join(**options: Any) -> Any:
    """Return the module ``ray``, joined to the cluster at ``address``, or to one that starts here.

    Raises:
        RunError: there is none, or it can't be started.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    address = options.setdefault("address", "local")
    try:
        ray.init(logging_level="ERROR", log_to_driver=False, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        local = address == "local"
        remedy = "" if local else "is Ray running there, and has this shell its token (RAY_AUTH_TOKEN)?"
        where = "this machine" if local else address
        raise RunError(f"no Ray cluster at {where}: {error}\n  {remedy}") from error
    return ray
