"""Joins a Ray cluster, or starts one on this machine."""

import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.runtime.cluster.sweeper import children

FIRST_WITH_TOKENS = (2, 52)  # the first version of Ray that asks for a token
MODE = "RAY_AUTH_MODE"  # Ray reads this variable, and these two
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
ANSWERS_WITHIN = 10.0  # seconds for each answer of a cluster's port: Ray itself waits for minutes
# what a client of HTTP/2, and so of gRPC, sends first, with empty SETTINGS, and the type of the frame that a
# server answers with (RFC 9113, sections 3.4 and 6.5)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS_FRAME = 4
FRAME_HEADER_BYTES = 9
BLOCKED = (signal.SIGHUP, signal.SIGTERM)  # in Ray's processes; Ray blocks SIGINT there itself
STARTS = 3  # tries to start Ray on this machine
TOO_SHORT = re.compile("timed out", re.IGNORECASE)  # in what Ray says of such a start
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
        RunError: there is no such cluster, or Ray can't be started, or its version can't ask for a token.
    """
    address = options.setdefault("address", "local")
    settings = dict(SETTINGS)
    if address == "local":
        settings[MODE] = "token"  # Ray asks for a token, and sends one, in this mode alone
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    import ray
    from ray._raylet import Config  # type: ignore[attr-defined]  # of Cython, without types

    Config.initialize("")  # it reads the variables anew, where Ray was imported before
    if tuple(map(int, ray.__version__.split(".")[:2])) < FIRST_WITH_TOKENS:
        law = f"Ray {ray.__version__} lets anyone who reaches its ports run code"
        raise RunError(f"{law}\n  pip install --upgrade 'ray>={FIRST_WITH_TOKENS[0]}.{FIRST_WITH_TOKENS[1]}'")
    if os.environ.get(MODE) == "token":
        _make_token()
    if address != "local":
        _knock(address)
    # Ray's processes are in this process's group: a signal to the group is this process's to handle
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        start = partial(ray.init, logging_level=logging.ERROR, log_to_driver=False, **options)
        if address == "local":
            start_patiently(start)
        else:
            start()
    except SystemExit as error:  # by Ray's own handler of SIGTERM
        raise KeyboardInterrupt from error
    except Exception as error:  # Ray raises errors of many kinds here, `Exception` itself too
        if address == "local":
            raise RunError(f"Ray can't be started on this machine: {error}") from error
        law = f"this process could not join the Ray cluster at {address}: {error}"
        remedy = "see that Ray runs on this machine, too: ray start --address HOST:PORT"
        raise RunError(f"{law}\n  {remedy}; see docs/clusters.md") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has set one of its own
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    return ray


def start_patiently(start: Callable[[], Any]) -> None:
    """Start Ray on this machine, again where its own time was too short: a busy machine needs more.

    Ray 2.60 waits 30 seconds for its first process, and has no setting for it. What a try has started is
    ended before the next one, which would else share the machine with it.

    Raises:
        Exception: any other that Ray raises, and after ``STARTS`` tries that its time was too short.
    """
    for left in reversed(range(STARTS)):
        earlier = {*children(os.getpid())}
        try:
            start()
            return
        except Exception as error:  # Ray raises a bare Exception for this
            if left == 0 or not TOO_SHORT.search(str(error)):
                raise
        for process in {*children(os.getpid())} - earlier:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _knock(address: str) -> None:
    """Check that a Ray cluster answers at its address: the port, a server of gRPC, and Ray's own service.

    Raises:
        RunError: one of them does not, within ``ANSWERS_WITHIN`` seconds.
    """
    resolved = _resolved(address)
    match = re.fullmatch(r"(?:ray://)?(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:/]+)):(?P<port>\d+)", resolved)
    if match is None:
        _turn_tokens_on()
        return  # an address of another form, which Ray may understand
    host = match["ipv6"] or match["host"]
    port = int(match["port"])
    remedy = f"  start one there: ray start --head --port {port}; see docs/clusters.md"
    try:
        connection = socket.create_connection((host, port), timeout=ANSWERS_WITHIN)
    except OSError as error:
        law = f"no Ray cluster at {address}: nothing answers at {host}, port {port} ({error})"
        raise RunError(f"{law}\n{remedy}") from error
    with connection:
        is_encrypted = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")  # as Ray reads it
        problem = None if is_encrypted else _no_grpc(connection)
    if problem:
        law = f"no Ray cluster at {address}: what answers at {host}, port {port} is not Ray ({problem})"
        raise RunError(f"{law}\n  give the port of `ray start --head`, 6379 by default; see docs/clusters.md")
    if resolved.startswith("ray://"):
        _turn_tokens_on()
    else:
        _ask_gcs(address, resolved)


def _no_grpc(connection: socket.socket) -> str | None:
    """Return why the peer is not a gRPC server, or None if it is one.

    Its whole answer has to arrive within ``ANSWERS_WITHIN`` seconds, even if each byte arrives in time.
    """
    deadline = time.monotonic() + ANSWERS_WITHIN
    header = b""
    try:
        connection.sendall(PREFACE)
        while len(header) < FRAME_HEADER_BYTES:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            connection.settimeout(remaining_s)
            received = connection.recv(FRAME_HEADER_BYTES - len(header))
            if not received:
                return "it closed the connection"
            header += received
    except TimeoutError:
        pass  # the number of bytes says it below
    except OSError as error:
        return str(error)
    if len(header) < FRAME_HEADER_BYTES:
        return f"{len(header)} of {FRAME_HEADER_BYTES} bytes came within {ANSWERS_WITHIN:g} s"
    if header[3] != SETTINGS_FRAME:
        return f"it does not speak gRPC: {header!r}"
    return None


def _ask_gcs(address: str, resolved: str) -> None:
    """Check that the server of gRPC at an address is the control service of a Ray cluster (GCS).

    Raises:
        RunError: it is another one, wants another token, or is silent for ``ANSWERS_WITHIN`` seconds.
    """
    from ray._raylet import InnerGcsClient  # type: ignore[attr-defined]  # of Cython, without types
    from ray.exceptions import AuthenticationError, RpcError

    def ask() -> None:
        # Ray's own class for it waits for a minute, and `ray.init` tries that again and again
        InnerGcsClient.standalone(resolved, cluster_id=None, timeout_ms=int(1000 * ANSWERS_WITHIN))

    try:
        # a process that sends tokens refuses the calls of a cluster without, so it waits until it is asked
        try:
            with _silenced():
                ask()
        except AuthenticationError:
            if not _turn_tokens_on():
                raise
            ask()
    except AuthenticationError as error:
        where = f"{TOKENS[0]} or ~/.ray/auth_token"
        remedy = f"it asks for another token than that of {where}"
        if not _has_token():
            remedy = f"it asks for a token, and this shell has none: {where}"
        law = f"the Ray cluster at {address} refuses this process: {error}"
        raise RunError(f"{law}\n  {remedy}; see docs/clusters.md") from error
    except RpcError as error:
        reason = str(error).removeprefix("RPC error:").strip() or "it knows no such call"
        law = f"no Ray cluster at {address}: what answers there is not Ray's control service (GCS), or did "
        law += f"not answer within {ANSWERS_WITHIN:g} s: {reason}"
        remedy = "give the port of `ray start --head`, 6379 by default, not that of a client or a worker"
        raise RunError(f"{law}\n  {remedy}; see docs/clusters.md") from error


@contextmanager
def _silenced() -> Iterator[None]:
    """Drop what is written to stderr meanwhile: Ray's C++ code reports each refused call there."""
    sys.stderr.flush()
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def _resolved(address: str) -> str:
    """Return the address that ``auto`` stands for, if Ray has noted one."""
    if address != "auto":
        return address
    from ray._private.utils import read_ray_address

    return os.environ.get("RAY_ADDRESS") or read_ray_address() or address


def _has_token() -> bool:
    """Return whether Ray would find a token: in its variables, or in this user's file."""
    return any(map(os.environ.get, TOKENS)) or (Path.home() / ".ray" / "auth_token").is_file()


def _turn_tokens_on() -> bool:
    """Let this process send its token, unless it has none or the mode is set; return whether it does now."""
    if os.environ.get(MODE) or not _has_token():
        return False
    from ray._raylet import Config  # type: ignore[attr-defined]  # of Cython, without types

    os.environ[MODE] = "token"
    Config.initialize("")  # it reads the variable anew
    _make_token()
    return True


def on_node(task: Any, node: str, **options: Any) -> Any:
    """Return a remote function that runs on one node, by Ray's name of it, or not at all."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options)


def _make_token() -> None:
    """Make sure that there is a token, in a file that only this user can read, unlike one that Ray makes."""
    if any(map(os.environ.get, TOKENS)):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)  # a link appears with its whole content: another run may read it now
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)
