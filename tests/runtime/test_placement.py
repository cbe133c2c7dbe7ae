"""Workers on GPUs of a Ray cluster whose driver has none: Ray is told of GPUs that this machine lacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ran import ray_nodes

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, RunError
from rlgraph.ir.plan import Plan, Target
from rlgraph.runtime.cluster import ray_start
from rlgraph.runtime.cluster.cluster import RayCluster
from rlgraph.runtime.cluster.devices import agree, enough_memory, of_machine, of_ray, wait_for_memory
from rlgraph.runtime.cluster.placement import filled, reserved, seated, units
from rlgraph.runtime.engines.servers.groups import check_groups, own_device
from rlgraph.runtime.run import run_graph

pytestmark = pytest.mark.slow

ONE = str(Path(__file__).parent / "ones.yaml")
LISTED = "".join(f"{n}, GPU-{n}, NVIDIA H100 80GB HBM3, 81559\n" for n in range(4))
SIZES = {"a": 3, "b": 3, "gen": 2}  # on hosts of 4, a pool at a time would leave gen one GPU on either
EMBEDDED = "models.policy.serve.engine=transformers"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU here")


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of what ``nvidia-smi`` prints on every host of ``gpus``; without it, it fails."""
    return tmp_path_factory.mktemp("smi") / "listing"


@pytest.fixture(scope="module")
def gpus(listing: Path) -> Iterator[str]:
    """A Ray cluster of two hosts with 4 GPUs each, and a head without CPUs and GPUs, as KubeRay has it."""
    command = listing.parent / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nexec cat {listing}\n")
    command.chmod(0o755)
    counts = {"127.0.0.9": 0, "127.0.0.1": 4, "127.0.0.2": 4}
    nodes = [{"num_cpus": n, "num_gpus": n, "node_ip_address": at} for at, n in counts.items()]
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
            patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            address = stack.enter_context(ray_nodes(*nodes))
        yield address


@pytest.fixture
def driver(gpus: str) -> Iterator[Any]:
    """Ray, joined to that cluster."""
    ray = ray_start.join(address=gpus)
    yield ray
    ray.shutdown()


@pytest.fixture
def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def places(cluster: RayCluster) -> dict[tuple[str, int], tuple[str, str]]:
    """Address and GPU of the worker at each place."""
    found = cluster.get([cluster.call(place, "place")[0] for place in cluster.places])
    return {place: (at, gpu) for place, (_, at, gpu) in zip(cluster.places, found, strict=True)}


@pytest.mark.nightly
@needs_no_gpu
def test_pools_fill_hosts_in_turn_and_no_group_is_split(gpus: str, tmp_path: Path) -> None:
    cluster = RayCluster(SIZES, True, gpus, tmp_path, 300, together={"gen": 2})
    try:
        found = places(cluster)
        hosts = {place: at for place, (at, _) in found.items()}
        assert len({hosts["gen", 0], hosts["gen", 1]}) == 1
        assert len({hosts["a", number] for number in range(3)}) == 1
        assert [hosts["b", number] for number in range(3)] == ["127.0.0.1", "127.0.0.2", "127.0.0.2"]
        # a worker sees its own GPU alone, whatever else Ray lets it see, and those of a pool are in order
        assert sorted(found.values()) == [
            (f"127.0.0.{host}", str(gpu)) for host in (1, 2) for gpu in range(4)
        ]
        assert [*found.values()] == sorted(found.values())
        with pytest.raises(
            RunError,
            match=r"Ray has given GPU 1 of host .*torch finds none there: torch .* without CUDA\n  install",
        ):
            cluster.get(cluster.call(("a", 1), "environment"))
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("pools", "together", "said"),
    [
        (
            {"a": 5, "gen": 4},
            {"gen": 2},
            r"9 workers with a GPU and a CPU each \(a 5, gen 4, those of gen by 2",
        ),
        ({"gen": 8}, {"gen": 8}, r"those of gen by 8 on one host\)"),
    ],
)
def test_a_cluster_without_room_is_refused_with_both(
    driver: Any, pools: dict[str, int], together: dict[str, int], said: str
) -> None:
    with pytest.raises(RunError, match=f"no room for .*{said}") as caught:
        reserved(driver, units(pools, together), True, 1.0, lambda: None)
    text = str(caught.value)
    assert "waited 1 s" in text and "free of all are 8 GPU, 8 CPU" in text
    assert all(f"127.0.0.{host}: 4 GPU, 4 CPU" in text for host in (1, 2))


def test_groups_go_where_others_leave_room_for_whole_ones(driver: Any) -> None:
    from ray.util.placement_group import placement_group, placement_group_table

    taken = placement_group([{"GPU": 1.0}] * 2, strategy="STRICT_SPREAD")
    assert taken.wait(60)
    group = reserved(driver, units({"a": 2, "gen": 4}, {"gen": 2}), True, 60, lambda: None)
    nodes = placement_group_table(group)["bundles_to_node_id"]
    assert len({nodes[2], nodes[3]}) == 2, "3 GPUs are free on either host: a group of 2 on each"
    with pytest.raises(RunError, match="those of gen by 2 on one host"):
        reserved(driver, units({"gen": 2}, {"gen": 2}), True, 1.0, lambda: None)  # none is left


def spots(order: Sequence[str]) -> list[tuple[str, int]]:
    """Host and device of workers, in the order in which they were started: devices of a host in turn."""
    return [(host, order[:number].count(host)) for number, host in enumerate(order)]


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("BBBBAAAAAAAABBBB", "aaaaaabb bbbbgggg"),  # as Ray packs them: the largest first
        ("AAAAAABBBBBBCCCC", "aaaaaa bbbbbb gggg"),
        ("AAAAAAABBBBBCCCC", "aaaaaab bbbbb gggg"),
        ("AAABBBBBBCCCAAAA", "aaagggg aaabbb bbb"),  # in turn no four would be left for gen: it comes first
    ],
)
def test_sixteen_workers_take_their_seats(order: str, text: str) -> None:
    parts = units({"a": 6, "b": 6, "gen": 4}, {"gen": 4})
    where = spots(order)
    seats = seated(parts, where)
    assert sorted(seats) == [*range(16)]
    taken = dict(zip(seats, "aaaaaabbbbbbgggg", strict=True))
    hosts = {
        host: sorted((gpu, taken[n]) for n, (at, gpu) in enumerate(where) if at == host) for host in "ABC"
    }
    assert " ".join("".join(pool for _, pool in held) for held in hosts.values() if held) == text
    for first, last in ((0, 6), (6, 12), (12, 16)):
        assert [where[seat] for seat in seats[first:last]] == sorted(
            where[seat] for seat in seats[first:last]
        )


def test_where_no_order_fills_the_hosts_workers_stay_as_ray_has_put_them() -> None:
    sizes, hosts = [3, 3, 2, 2, 2], "ABAAB"
    assert filled(sizes, {"A": 7, "B": 5}) is None
    parts = [(f"pool{number}", size) for number, size in enumerate(sizes)]
    own = [host for host, size in zip(hosts, sizes, strict=True) for _ in range(size)]
    where = spots("".join(own))
    assert [where[seat][0] for seat in seated(parts, where)] == own


@needs_no_gpu
@pytest.mark.usefixtures("no_gpu_here")
def test_what_there_is_comes_from_the_cluster_not_from_the_driver(gpus: str, listing: Path) -> None:
    assert of_machine().kind == "cpu"
    listing.write_text(LISTED)
    there = of_ray(gpus)
    assert (there.kind, there.per_host, str(there)) == ("cuda", (4, 4), "8 GPUs on 2 hosts")
    cluster = there.cluster()
    assert (cluster.cluster, cluster.hosts, cluster.total) == ("auto-2x4xH100-80GB-HBM3", 2, 8)
    listing.unlink()
    there = of_ray(gpus)
    assert (there.kind, there.per_host) == ("cuda", (4, 4))
    with pytest.raises(GraphError, match="`nvidia-smi` failed"):
        there.cluster()


@pytest.mark.nightly
@needs_no_gpu
@pytest.mark.usefixtures("no_gpu_here", "in_demo")
def test_a_run_is_planned_for_the_gpus_of_the_cluster(gpus: str, listing: Path) -> None:
    listing.write_text(LISTED)
    given = [ONE, EMBEDDED, "--devices", "1", "--address", gpus]
    command = [sys.executable, "-m", "rlgraph", "run", *given]
    done = subprocess.run([*command, "--run-dir", "run"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert re.search(r"main\[0\](.|\n)*Ray has given GPU \d of host", done.stderr), done.stdout + done.stderr
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["origin"]["target"]["cluster"] == "auto"
    assert plan["predicted"]["cluster"] == "auto-2x4xH100-80GB-HBM3"


@needs_no_gpu
@pytest.mark.usefixtures("no_gpu_here", "in_demo")
def test_a_plan_for_other_devices_is_refused_with_both(gpus: str, listing: Path) -> None:
    listing.write_text(LISTED)
    said = r"the plan is for GPUs \(h100-8\), and this machine has \d+ CPUs\n.*--cluster auto"
    with pytest.raises(RunError, match=said):
        run_graph(ONE, (), 1, target=Target("h100-8"))
    said = r"the plan is for CPUs \(cpu\), and the Ray cluster at [\d.:]+ has 8 GPUs on 2 hosts\n"
    with pytest.raises(RunError, match=said):
        run_graph(ONE, (), 1, target=Target("cpu"), address=gpus)
    assert not Path("runs").exists()


def h100(devices: int = 8) -> Plan:
    return compile_graph("grpo", devices=devices, target=Target("h100-8"))


def test_more_devices_than_this_machine_has_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlgraph.costs import detect

    monkeypatch.setattr(detect, "_gpu_files", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    agree(h100(4), of_machine())
    with pytest.raises(RunError, match="takes 8 devices, and this machine has 4 GPUs"):
        agree(h100(8), of_machine())


def test_a_device_with_less_memory_than_the_plan_counts_on_is_refused() -> None:
    plan = h100(2)
    at = {"pool": "main", "host": "one", "name": "NVIDIA H100 80GB HBM3"}
    enough_memory(
        plan, [{**at, "device": 0, "memory": int(79.1e9)}, {**at, "device": 1, "memory": int(85e9)}]
    )
    enough_memory(plan, [{**at, "device": 0}])  # a CPU does not say how much it has
    short = {"name": "NVIDIA A100-SXM4-40GB", "memory": int(42.3e9), "device": 1}
    said = r"on 76.1 GB of each device \(h100-8\), and main\[1\] has 42.3 GB: NVIDIA A100-SXM4-40GB of one"
    with pytest.raises(RunError, match=said):
        enough_memory(plan, [{**at, "device": 0, "memory": int(85e9)}, {**at, **short}])
    enough_memory(compile_graph("grpo", devices=2), [{**at, **short}])


@pytest.mark.parametrize(
    ("planned", "asked"),
    [(None, 3), (0.2, 2), (1.0, 3), (2.0, 3)],
    ids=["unplanned", "a small plan", "a full plan", "more than there is"],
)
def test_a_new_attempt_waits_for_the_memory_of_what_was_lost(planned: float | None, asked: int) -> None:
    plan, whole = compile_graph("grpo", devices=2), 80 * 10**9
    if planned is not None:
        priced = h100(2)
        assert priced.peak
        peak = {"main": replace(priced.peak["main"], bytes=int(planned * whole))}
        plan = replace(priced, peak=peak)
    answers = iter([[8, 78], [30, 78], [78, 78], [78, 78]])
    slept: list[float] = []
    wait_for_memory(
        plan,
        [("main", 0), ("main", 1)],
        lambda: [(free * 10**9, whole) for free in next(answers)],
        slept.append,
    )
    assert len(slept) == asked - 1
    assert len([*answers]) == 4 - asked


def test_an_attempt_does_not_wait_for_ever_nor_on_cpus() -> None:
    plan, slept = compile_graph("grpo", devices=1), list[float]()
    wait_for_memory(plan, [("main", 0)], lambda: [None], slept.append)
    assert not slept
    wait_for_memory(plan, [("main", 0)], lambda: [(1, 100)], slept.append)
    assert sum(slept) == 60


def test_a_server_is_on_different_gpus_of_one_host() -> None:
    one, two = [("one", "6"), ("one", "7")], [("two", "6"), ("two", "7")]
    check_groups(one + two, 2, "cuda")
    said = "a server spans devices 0 to 3 of its pool .*6 of one, 7 of one, 6 of two, 7 of two"
    with pytest.raises(RunError, match=said):
        check_groups(one + two, 4, "cuda")
    with pytest.raises(RunError, match=r"spans devices 2 to 3 .*these are 0 of one, 0 of one"):
        check_groups([*one, ("one", "0"), ("one", "0")], 2, "cuda")
    check_groups([("one", "0"), ("one", "0")], 2, "cpu")  # cores may be shared


def test_a_server_sees_the_gpus_that_its_workers_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert own_device("cuda", 0) == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert own_device("cuda", 0) == "0"


@needs_no_gpu
@pytest.mark.nightly
def test_on_one_host_each_worker_has_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # last: actors of the cluster above do not start in a process that has had a Ray of its own
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cluster = RayCluster({"main": 2}, True, None, tmp_path, 300)
    try:
        assert [gpu for _, gpu in places(cluster).values()] == ["0", "1"]
    finally:
        cluster.close()
