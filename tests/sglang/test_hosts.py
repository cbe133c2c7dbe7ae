"""A server over several hosts, here of one machine: its processes begin and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rlgraph.errors import RunError
from rlgraph.runtime.engines.sglang import groups
from rlgraph.runtime.engines.sglang.hosts import FirstServer, Follower, Starts
from rlgraph.runtime.engines.sglang.launch import Launch
from rlgraph.runtime.engines.sglang.options import wrong

pytestmark = pytest.mark.filterwarnings("default")

PROCESS = """
import http.server, json, sys
at = json.load(open(sys.argv[1]))
node = int(sys.argv[2])
print("node", node, "of", sys.argv[3], flush=True)
if sys.argv[4] == "dies":
    sys.exit("out of memory, as it were")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer((at["host"], at["port"]), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Small(Launch):
    """A process that says that it is up, or ends at once."""

    does: str = "runs"

    def arguments(self, configuration: Path) -> list[str]:
        span = self.settings()
        does = self.does if span["node_rank"] else "runs"
        words = [configuration, span["node_rank"], span["dist_init_addr"], does]
        return ["-c", PROCESS, *map(str, words)]

    def environment(self, given: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
        return dict(given)


def until(true: Callable[[], object]) -> None:
    while not true():
        threading.Event().wait(0.05)


@pytest.fixture
def starts() -> tuple[Starts, Starts]:
    first = Starts(2, 0, "127.0.0.1")
    return first, Starts(2, 1, "127.0.0.1", first.port)


PLACE = ["0"], "127.0.0.1"
SMALL = Small("a/model", "cpu", "float32", 2, 64, 4)


@pytest.fixture
def follower(starts: tuple[Starts, Starts], tmp_path: Path) -> Iterator[Follower]:
    made = Follower(SMALL, tmp_path, *PLACE, starts[1])
    yield made
    made.close()


@pytest.mark.slow
def test_hosts_begin_together_and_one_that_ends_takes_the_others_with_it(
    starts: tuple[Starts, Starts], follower: Follower, tmp_path: Path
) -> None:
    first = FirstServer(SMALL, tmp_path, *PLACE, None, starts[0])
    first.wait(60)
    until(lambda: follower.server and follower.server.client.is_healthy())
    meeting = f"127.0.0.1:{first.meets.number}"
    assert f"node 1 of {meeting}" in follower.server.log.read_text()
    until(lambda: not follower.server.configuration.exists())

    before = follower.server
    os.killpg(before.process.pid, signal.SIGKILL)
    until(lambda: not first.is_alive())  # though nothing has ended it but this
    assert first.obituary().endswith("signal SIGKILL) on 127.0.0.1")
    assert [first.last_lines().count(f"node {node} of") for node in range(2)] == [1, 1]
    first.close()

    again = FirstServer(SMALL, tmp_path, *PLACE, first, starts[0])
    again.wait(60)
    until(lambda: follower.server is not before and follower.server.client.is_healthy())
    assert again.number == 2 and follower.server.port is before.port
    meeting = f"127.0.0.1:{again.meets.number}"
    assert f"node 1 of {meeting}" in follower.server.log.read_text()

    last = follower.server
    again.close()  # another start has not begun: it waits for it
    assert last.is_alive()
    third = FirstServer(SMALL, tmp_path, *PLACE, again, starts[0])
    until(lambda: not last.is_alive())
    third.close()


def test_a_host_that_does_not_come_up_is_named_with_the_end_of_its_log(
    starts: tuple[Starts, Starts], tmp_path: Path
) -> None:
    follower = Follower(Small(**vars(SMALL) | {"does": "dies"}), tmp_path, *PLACE, starts[1])
    first = FirstServer(SMALL, tmp_path, *PLACE, None, starts[0])
    until(lambda: not first.is_alive())
    with pytest.raises(RunError, match=r"exit code 1\) on 127.0.0.1(.|\n)*out of memory, as it were"):
        first.wait(60)
    follower.close()


@pytest.mark.slow
def test_a_follower_ends_its_process_once_the_worker_that_leads_is_gone(tmp_path: Path) -> None:
    """The store is of another process, as it is on another host."""
    script = "import sys, torch.distributed as dist\n"
    script += "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
    script += "store.set('1', '127.0.0.1:1'); store.add('starts', 1)\n"
    script += "print(store.port, flush=True); sys.stdin.read()"
    leads = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    follower = Follower(SMALL, tmp_path, *PLACE, Starts(2, 1, "127.0.0.1", int(leads.stdout.readline())))
    until(lambda: follower.server and follower.server.client.is_healthy())
    leads.kill()
    leads.communicate()
    follower.thread.join()
    assert not follower.server.is_alive()


@pytest.mark.slow
def test_each_host_has_its_devices_and_what_a_server_shares_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Servers of four devices over two hosts with two each, as four workers of one pool begin them."""
    made: list[dict[str, Any]] = []
    engine = SimpleNamespace(supervisor=SimpleNamespace(client="a client"), reach=lambda servers: None)
    members = [(f"host-{index // 2}", str(index % 2)) for index in range(4)]
    led = Starts(2, 0, "127.0.0.1")
    answers = iter([members, [("127.0.0.1", led.port), None, None, None], ["a client", None, None, None]] * 4)
    for name, stands in {
        "of_ranks": lambda item, pool: next(answers),
        "interface": lambda hosts: "127.0.0.1",
        "SglangEngine": lambda path, **options: made.append(options) or engine,
        "_ranks": lambda *_: None,
        "release": lambda device: None,
        "own_device": lambda device, index: str(index % 2),
    }.items():
        monkeypatch.setattr(groups, name, stands)
    shared = {"expert_parallel": 4, "attention_replicas": 2, "options": {"moe_a2a_backend": "deepep"}}
    for index in range(4):
        pool = SimpleNamespace(rank=lambda index=index: index)
        given = {"group": 4, "hosts": 2, "max_cached_tokens": 1000, **shared}
        groups.sglang_engine("a/model", device="cuda", pool=pool, logs=tmp_path, **given)
    assert [one["leads"] for one in made] == [True, False, False, False]
    assert [one["starts"] and one["starts"].node for one in made] == [0, None, 1, None]
    assert [one["devices"] for one in made] == [["0", "1"]] * 4
    options = {"moe_a2a_backend": "deepep", "ep_size": 4, "attn_dp_size": 2}
    assert all(one["options"] == options and one["max_cached_tokens"] == 500 for one in made)
    launch = Launch(
        "a/model", "cuda", "bfloat16", 4, 500, 4, options, hosts=2, node=1, meeting="127.0.0.1:30000"
    )
    assert not wrong({name: value for name, value in launch.settings().items() if name != "model_path"})


@pytest.mark.nightly
def test_a_real_server_of_two_processes_has_all_weights(path: str, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = [sys.executable, str(Path(__file__).with_name("spanning.py"))]
    args = [str(store.port), path, str(tmp_path)]
    workers = [subprocess.Popen([*script, str(rank), *args]) for rank in range(2)]
    assert [worker.wait(900) for worker in workers] == [0, 0]
    both = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for number, (led, followed) in enumerate(zip(*both, strict=True), 1):
        assert led["sums"] == followed["sums"] and len(led["sums"][0]) == 2  # a checksum of each rank
        for seen in (led, followed):
            assert {*seen["version"]} == {number} and seen["greedy"] and seen["apart"] < 1e-4
    assert both[0][0]["sums"] != both[0][1]["sums"] == both[0][2]["sums"]
