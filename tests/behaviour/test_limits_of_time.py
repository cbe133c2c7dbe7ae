"""What limits of time of urllib, aiohttp, fsspec and rich leave open, and rlgraph adds."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 20\r\nConnection: close\r\n\r\n"


@contextmanager
def dripping() -> Iterator[tuple[str, list[str]]]:
    """A server that sends 20 bytes in four seconds; yields its URL, and the requests that came."""
    asked = list[str]()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked.append(connection.recv(2**16).decode().split()[0])
            connection.sendall(HEAD)
            for _ in range(20 if asked[-1] == "GET" else 0):
                time.sleep(0.2)
                connection.sendall(b"x")

    def accept() -> None:
        with suppress(OSError):  # it was closed
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/rows.txt", asked
        server.shutdown(socket.SHUT_RDWR)


def test_the_timeout_of_urlopen_is_one_per_read() -> None:
    with dripping() as (url, _), urllib.request.urlopen(url, timeout=0.5) as reply:
        since = time.monotonic()
        assert reply.read() == b"x" * 20
        assert time.monotonic() - since > 3


def test_sock_read_of_aiohttp_is_one_per_read_and_total_is_not() -> None:
    from aiohttp import ClientSession, ClientTimeout

    async def read(url: str, timeout: ClientTimeout) -> bytes:
        async with ClientSession(timeout=timeout) as session, session.get(url) as reply:
            return await reply.read()

    with dripping() as (url, _):
        assert asyncio.run(read(url, ClientTimeout(total=None, sock_read=0.5))) == b"x" * 20
        with pytest.raises(TimeoutError):
            asyncio.run(read(url, ClientTimeout(total=0.5)))


def test_aiohttp_gives_a_whole_download_five_minutes_where_nothing_is_said() -> None:
    import aiohttp.client

    assert aiohttp.client.DEFAULT_TIMEOUT.total == 300


def test_get_of_fsspecs_http_reads_a_file_twice_and_get_file_once(tmp_path: Path) -> None:
    import fsspec

    counts = {}
    for name in ("get", "get_file"):
        system = fsspec.filesystem("http", skip_instance_cache=True)
        with dripping() as (url, asked):
            getattr(system, name)(url, str(tmp_path / name))
            counts[name] = asked.count("GET")
        assert (tmp_path / name).read_bytes() == b"x" * 20
    assert counts == {"get": 2, "get_file": 1}


BROKEN = """
from rich.console import Console
console = Console()
try:
    while True:
        console.print("x" * 100)
except SystemExit as error:
    import os, sys
    print("exit", error.code, file=sys.stderr)
    os._exit(7)
"""


def test_rich_exits_where_who_reads_its_output_has_gone() -> None:
    """What is no ``Exception`` passes a handler that would save what is trained."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", BROKEN], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (7, b"exit 1\n")
