"""Runs on a Ray cluster of several hosts, here nodes of Ray on one machine, each with its own address."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ran import metrics, ray_nodes, rlgraph

from rlgraph.errors import RunError
from rlgraph.runtime.cluster.cluster import RayCluster
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
ONE, TWO = str(HERE / "ones.yaml"), str(HERE / "ones_two.yaml")
OPS = HERE / "ones_ops.py"
pytestmark = [pytest.mark.usefixtures("in_demo"), pytest.mark.nightly]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster of three nodes with one CPU each."""
    with ray_nodes(*({"num_cpus": 1, "node_ip_address": f"127.0.0.{n}"} for n in (3, 1, 2))) as address:
        yield address


def test_workers_are_in_the_order_of_hosts(address: str) -> None:
    cluster = RayCluster({"main": 3}, gpus=False, address=address, logs=Path("logs"), timeout=300)
    try:
        called = [cluster.call(place, "place")[0] for place in cluster.places]
        assert [at for _, at, _ in cluster.get(called)] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        (joined,) = cluster.call(("main", 2), "join", "/nowhere", {})
        with pytest.raises(RunError, match="give a --run-dir on a disk that all hosts share"):
            cluster.get([joined])
    finally:
        cluster.close()


def test_a_lost_host_is_replaced_and_changes_no_weight(address: str) -> None:
    folder = Path("sprung").resolve()
    folder.mkdir()
    trap = f"{{op: '{OPS}:trapped', on: rewards, pool: train, host: true, folder: '{folder}'"
    trap += ", traps: {policy: 2}}"
    Path("trapped.yaml").write_text(f"graph: t\nextends: {TWO}\nedits:\n  - insert: {{trap: {trap}}}\n")
    schedule = "schedule={iterations: 3, restarts: 1}"
    text = rlgraph("run", "trapped.yaml", schedule, "--address", address, "--run-dir", "a")
    assert os.listdir("sprung") == ["policy"]
    assert "restart 1 of 1" in text
    run_graph(TWO, (schedule,), 1, inline=True, run_dir=Path("b"))
    of_rewards = []  # without those of the trap, which the other graph does not have
    for line in metrics("a"):
        of_rewards.append({name: value for name, value in line.items() if not name.startswith("trap/")})
    assert of_rewards == metrics("b")


def test_a_pool_over_two_hosts_gives_the_numbers_of_one(address: str) -> None:
    rlgraph("run", ONE, "--devices", "2", "--address", address, "--run-dir", "two")
    run_graph(ONE, (), 1, inline=True, run_dir=Path("one"))
    for left, right in zip(metrics("one"), metrics("two"), strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert math.isclose(left[name], right[name], rel_tol=1e-4, abs_tol=1e-4), (name, left, right)
