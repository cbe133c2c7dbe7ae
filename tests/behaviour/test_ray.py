"""What Ray 2.60 does that a good guess misses, and that rlgraph relies on or mends (docs/clusters.md)."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not ray.__version__.startswith("2.60."), reason="facts of Ray 2.60"),
]

INIT = (
    "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False); print('in')"
)
PROBE = """
import sys, ray
from ray._raylet import InnerGcsClient
try:
    InnerGcsClient.standalone(sys.argv[1], cluster_id=None, timeout_ms=5000)
    print("answers")
except ray.exceptions.AuthenticationError:
    print("asks for a token")
"""
ACTOR = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=0)
class Actor:
    def lives(self):
        return "lives"

try:
    actor = Actor.remote()
    print(ray.get(actor.lives.remote(), timeout=60))
except Exception as error:
    print(type(error).__name__)
"""
LOCAL = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=0)
class Actor:
    def exits(self):
        raise SystemExit("enough")

    def fails(self):
        raise ValueError("once")

    def lives(self):
        return "lives"

def said(call, *calls):
    actor = Actor.remote()
    try:
        ray.get(getattr(actor, call).remote())
    except Exception as error:
        kind = type(error).__name__
    try:
        return kind, ray.get(actor.lives.remote())
    except ray.exceptions.RayActorError:
        return kind, "is gone"

print("", ray.get_runtime_context().gcs_address, *said("fails"), *said("exits"), sep=";", flush=True)
input()
ray.shutdown()
"""


def without_tokens(home: Path, **more: str) -> dict[str, str]:
    """The environment of a user of whom Ray knows nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", **more}


@pytest.mark.parametrize("listens", [False, True], ids=["nothing listens", "another service listens"])
def test_init_with_an_address_says_nothing_and_ends_at_no_time_that_one_would_wait(
    listens: bool, tmp_path: Path
) -> None:
    """After 400 s it was still trying."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        command = [sys.executable, "-c", INIT, f"127.0.0.1:{server.getsockname()[1]}"]
        trying = subprocess.Popen(
            command,
            env=without_tokens(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                trying.communicate(timeout=75)
        finally:
            os.killpg(trying.pid, signal.SIGKILL)
            trying.communicate()


@contextmanager
def local_ray(env: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """A Ray that a process starts: its address, and what it said of two calls (``LOCAL``)."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LOCAL], env=env, text=True, **pipes) as local:  # type: ignore[call-overload]
        while ";" not in (line := local.stdout.readline()):  # Ray may say that it made a token
            assert line, "it ended"
        _, address, *said = line.strip().split(";")
        yield address, said
        local.communicate("\n")


def printed(script: str, address: str, env: dict[str, str]) -> str:
    """What a script prints that is given the address of a cluster."""
    command = [sys.executable, "-c", script, address]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return str(done.stdout.strip())


def test_a_local_ray_turns_tokens_on_and_a_method_that_exits_ends_its_actor(tmp_path: Path) -> None:
    """Three facts of one cluster, as it takes its time to start."""
    with local_ray(without_tokens(tmp_path)) as (address, said):
        answers = [
            printed(PROBE, address, without_tokens(tmp_path)),
            printed(PROBE, address, without_tokens(tmp_path, RAY_AUTH_MODE="token")),
        ]
    assert said[:2] == ["RayTaskError(ValueError)", "lives"]
    assert said[2] in ("ActorDiedError", "RayActorError", "ActorUnavailableError") and said[3] == "is gone"
    token = tmp_path / ".ray" / "auth_token"
    assert token.is_file(), "nobody asked for one"
    assert stat.S_IMODE(token.stat().st_mode) & 0o077, (
        "others may read it; runtime/cluster/ray_start.py mends it"
    )
    assert answers == ["asks for a token", "answers"], "the file is read where RAY_AUTH_MODE says so alone"


def test_a_driver_in_token_mode_refuses_the_calls_of_a_cluster_without_tokens(tmp_path: Path) -> None:
    """It joins such a cluster, and each actor that it starts there is dead at once."""
    without = without_tokens(tmp_path, RAY_AUTH_MODE="disabled")
    with_token = without_tokens(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64)
    with local_ray(without) as (address, _):
        assert printed(ACTOR, address, without) == "lives"
        assert printed(ACTOR, address, with_token) == "ActorDiedError"
