"""Joins a Ray cluster, or starts one on this machine."""

import os
import secrets
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError

GUARDED = (2, 52)  # the first version of Ray that asks for a token
MODE, TOKENS = "RAY_AUTH_MODE", ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # variables that Ray reads
KEPT = (signal.SIGHUP, signal.SIGTERM)  # from Ray's processes; Ray keeps SIGINT from them itself
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
        RunError: there is none, or it can't be started, or Ray is of a version that asks for no token.
    """
    address = options.setdefault("address", "local")
    for name, value in (SETTINGS | ({MODE: "token"} if address == "local" else {})).items():
        os.environ.setdefault(name, value)
    import ray
    from ray._raylet import Config

    Config.initialize("")  # it reads the variables anew, where Ray was imported before
    if tuple(map(int, ray.__version__.split(".")[:2])) < GUARDED:
        law = f"Ray {ray.__version__} lets anyone who reaches its ports run code"
        raise RunError(f"{law}\n  pip install --upgrade 'ray>={GUARDED[0]}.{GUARDED[1]}'")
    if os.environ.get(MODE) == "token":
        _make_token()
    # Ray's processes are in the group of this one: a signal to all of it is this one's to handle
    before, handler = signal.pthread_sigmask(signal.SIG_BLOCK, KEPT), signal.getsignal(signal.SIGTERM)
    try:
        ray.init(logging_level="ERROR", log_to_driver=False, **options)
    except SystemExit as error:  # by Ray's own handler of SIGTERM
        raise KeyboardInterrupt from error
    except Exception as error:  # Ray raises errors of many kinds here, `Exception` itself too
        local = address == "local"
        remedy = "" if local else "is Ray running there, and has this shell its token (RAY_AUTH_TOKEN)?"
        where = "this machine" if local else address
        raise RunError(f"no Ray cluster at {where}: {error}\n  {remedy}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has set one of its own
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ray


def on_node(task: Any, node: str, **options: Any) -> Any:
    """Return a remote function that runs on one host, as Ray names it, or not at all."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options)


def _make_token() -> None:
    """Make sure that there is a token, in a file for this user alone; all could read one that Ray makes."""
    if any(map(os.environ.get, TOKENS)):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)  # whole at once: another run may read it now
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)
