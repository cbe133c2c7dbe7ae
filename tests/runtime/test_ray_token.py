"""A Ray that a run starts asks for a token which its user alone can read; one that asks for none is named."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import ray
from ran import ray_nodes, rlgraph

from rlgraph.errors import RunError
from rlgraph.runtime.cluster import ray_start

ONES = str(Path(__file__).parent / "ones.yaml")
STRANGER = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR")
print("in with", ray.get(ray.remote(lambda: "code").remote()))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ray_start.TOKENS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_token_is_made_once_and_for_its_user_alone(home: Path) -> None:
    ray_start._make_token()
    (path,) = (home / ".ray").iterdir()
    token = path.read_text()
    assert path.name == "auth_token" and len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)  # as Ray itself would have left it
    ray_start._make_token()
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (token, 0o600)


@pytest.mark.parametrize("name", ray_start.TOKENS)
def test_a_token_that_is_given_stays(home: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "given")
    ray_start._make_token()
    assert not (home / ".ray").exists()


def test_a_ray_that_knows_no_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.51.1")
    with pytest.raises(RunError, match=r"pip install --upgrade 'ray>=2.52'"):
        ray_start.join(num_cpus=1)
    assert not ray.is_initialized()


@pytest.mark.nightly
def test_a_stranger_is_refused_by_a_cluster_that_a_run_starts(home: Path) -> None:
    code = (
        "import subprocess, sys; from rlgraph.runtime.cluster.ray_start import join; ray = join(num_cpus=1)\n"
        "address = ray.get_runtime_context().gcs_address\n"
        f"stranger = [sys.executable, '-c', {STRANGER!r}, address]\n"
        "for env in ({'RAY_AUTH_MODE': 'disabled'}, {'RAY_AUTH_MODE': 'token', 'RAY_AUTH_TOKEN': 'guess'}):\n"
        "    import os; given = {**os.environ, **env}\n"
        "    done = subprocess.run(stranger, env=given, capture_output=True, text=True, timeout=200)\n"
        "    assert done.returncode and 'in with' not in done.stdout, done\n"
        "    print('refused')\n"
    )
    without = {name: value for name, value in os.environ.items() if name != ray_start.MODE}
    done = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True)
    assert done.stdout.count("refused") == 2, done.stdout + done.stderr
    assert stat.S_IMODE((home / ".ray/auth_token").stat().st_mode) == 0o600


@pytest.mark.nightly
@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_cluster_that_asks_for_no_token_is_named(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray_start.MODE, mode)
    ray._raylet.Config.initialize("")
    with ray_nodes({"num_cpus": 1}) as address:
        said = rlgraph("run", ONES, "--steps", "0", "--address", address, "--run-dir", "run")
    said_so = (
        f"the Ray cluster at {address} asks for no token: whoever reaches its ports can run code" in said
    )
    assert said_so == (mode == "disabled"), said


def test_a_cluster_that_is_not_there_is_named_at_once() -> None:
    with socket.socket() as taken:  # bound, and not listening: whoever knocks is refused
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        since = time.monotonic()
        with pytest.raises(RunError, match=rf"nothing answers at 127\.0\.0\.1, port {port}"):
            ray_start.join(address=f"127.0.0.1:{port}")
    assert time.monotonic() - since < ray_start.ANSWERS_WITHIN + 20  # Ray alone waits for minutes


def silent(connection: socket.socket) -> None:
    connection.recv(2**16)


def dripping(connection: socket.socket) -> None:
    while True:  # each read of a client gets something in time, and the whole never comes
        connection.sendall(b"\0")
        time.sleep(0.2)


def closing(connection: socket.socket) -> None:
    connection.recv(2**16)
    connection.close()


def http(connection: socket.socket) -> None:
    connection.recv(2**16)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def another_grpc(connection: socket.socket) -> None:
    """SETTINGS of HTTP/2 and no answer to any call, as a hung server."""
    connection.sendall(bytes((0, 0, 0, ray_start.SETTINGS_FRAME, 0, 0, 0, 0, 0)))
    while connection.recv(2**16):
        pass


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (silent, "is not Ray (0 of 9 bytes came within 1 s)"),
        (dripping, "of 9 bytes came within 1 s"),
        (closing, "it closed the connection"),
        (http, "it does not speak gRPC: b'HTTP/1.1 '"),
        (another_grpc, "is not Ray's control service (GCS), or did not answer within 1 s"),
    ],
)
def test_another_service_at_a_clusters_address_is_named(
    answer: Callable[[socket.socket], None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_start, "ANSWERS_WITHIN", 1.0)
    with served(answer) as port:
        since = time.monotonic()
        with pytest.raises(RunError) as raised:
            ray_start.join(address=f"127.0.0.1:{port}")
    assert time.monotonic() - since < 30  # Ray alone waits for minutes
    assert f"no Ray cluster at 127.0.0.1:{port}: what answers" in str(raised.value)
    assert problem in str(raised.value) and "give the port of `ray start --head`" in str(raised.value)


def test_a_host_that_drops_what_is_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "ANSWERS_WITHIN", 1.0)
    with socket.socket() as full, ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        for _ in range(4):  # the queue is full: Linux drops what further clients send
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        with pytest.raises(RunError, match=rf"nothing answers at 127\.0\.0\.1, port {port} \(timed out\)"):
            ray_start.join(address=f"127.0.0.1:{port}")


@pytest.mark.nightly
@pytest.mark.usefixtures("home")
def test_a_worker_of_ray_at_a_clusters_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A raylet speaks gRPC, as the head's control service does."""
    monkeypatch.setenv(ray_start.MODE, "disabled")
    ray._raylet.Config.initialize("")
    with ray_nodes({"num_cpus": 1, "node_manager_port": (port := free_port())}) as address:
        host = address.rpartition(":")[0]
        ray_start._knock(address)
        with pytest.raises(RunError, match="what answers there is not Ray's control service"):
            ray_start.join(address=f"{host}:{port}")


@contextmanager
def served(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does so with each connection; yields its port."""

    def serve(connection: socket.socket) -> None:
        with suppress(OSError):  # the client has gone
            answer(connection)

    def accept() -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = server.accept()
                connections.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.nightly
def test_a_cluster_that_asks_for_the_users_token_is_joined(home: Path, tmp_path: Path) -> None:
    """Ray 2.60 asks for a token wherever the user's file is there; a client has to be told to send it."""
    ray_start._make_token()
    code = (
        "import subprocess, sys, os; from rlgraph.runtime.cluster.ray_start import join\n"
        "address = join(num_cpus=1).get_runtime_context().gcs_address\n"
        "mine = 'import sys; from rlgraph.runtime.cluster.ray_start import join; '\n"
        "mine += 'print(join(address=sys.argv[1]).is_initialized())'\n"
        "env = {name: value for name, value in os.environ.items() if name != 'RAY_AUTH_MODE'}\n"
        "command = [sys.executable, '-c', mine, address]\n"
        "done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)\n"
        "print(done.stdout, done.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "True" in done.stdout, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("home")
def test_a_cluster_that_asks_for_another_token_is_named_at_once() -> None:
    code = (
        "import subprocess, sys, os, time; from rlgraph.runtime.cluster.ray_start import join\n"
        "address = join(num_cpus=1).get_runtime_context().gcs_address\n"
        "other = 'import sys; from rlgraph.runtime.cluster.ray_start import join; '\n"
        "other += 'join(address=sys.argv[1])'\n"
        "env = {**os.environ, 'RAY_AUTH_TOKEN': 64 * 'x'}\n"
        "since, command = time.monotonic(), [sys.executable, '-c', other, address]\n"
        "print(subprocess.run(command, env=env, capture_output=True, text=True, timeout=200).stderr)\n"
        "print('after', time.monotonic() - since)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "refuses this process" in done.stdout, done.stdout + done.stderr
    assert "it asks for another token than that of RAY_AUTH_TOKEN or ~/.ray/auth_token" in done.stdout
    assert float(done.stdout.rpartition("after ")[2]) < 60
