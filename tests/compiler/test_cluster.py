"""Clusters: those that are shipped, those in files, and what is wrong with a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import BEST, Rates
from rlgraph.costs.hardware import FOLDER, Cluster, shipped_clusters
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Target
from usual_settings import usual


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(GraphError) as caught:
        load_cluster(str(path))
    return str(caught.value)


def test_the_shipped_clusters() -> None:
    names = [*shipped_clusters()]
    assert {name.partition("-")[0] for name in names} == {
        "cpu",
        "a100",
        "h20",
        "h100",
        "h200",
        "b200",
        "gb200",
    }
    sizes = {name: load_cluster(name).total for name in names if name != "cpu"}
    assert sizes == {name: int(name.partition("-")[2]) for name in sizes}


@pytest.mark.parametrize("name", shipped_clusters())
def test_a_cluster_is_named_after_its_file(name: str) -> None:
    assert load_cluster(name).cluster == name


def test_devices_of_one_generation_differ_in_hosts_alone() -> None:
    small, large = load_cluster("h100-8"), load_cluster("h100-1024")
    assert large == small.model_copy(update={"cluster": "h100-1024", "hosts": 128})


def test_the_slowest_link_decides() -> None:
    cluster = load_cluster("h100-64")
    assert [cluster.link(0, devices) for devices in (1, 8, 9, 64)] == [450e9, 450e9, 50e9, 400e9]
    assert [cluster.link(first, 4) for first in (0, 4, 6, 7, 8)] == [450e9, 450e9, 100e9, 50e9, 450e9]


def test_a_collective_over_hosts_uses_all_their_adapters() -> None:
    cluster = load_cluster("h100-64")
    # as many at once as a host has devices, each of one device per host: an adapter each
    assert [cluster.link(0, 64, apart=n) for n in (1, 2, 8, 64)] == [400e9, 200e9, 50e9, 50e9]
    half = cluster.model_copy(update={"adapters": 4})
    assert [half.link(0, 64), half.link(0, 64, apart=8), half.link(7, 2)] == [200e9, 25e9, 50e9]
    assert cluster.model_copy(update={"adapters": 16}).link(0, 64) == cluster.intra_link
    slow = load_cluster("a100-64")
    assert (slow.link(0, 64), slow.link(0, 8)) == (200e9, 300e9)


def test_an_all_to_all_over_hosts_has_an_adapter_for_each_device() -> None:
    rates = Rates(load_cluster("h100-64"), 16, "bfloat16", BEST)
    assert rates.travel(1) == pytest.approx(1 / (400e9 * 0.8))
    assert rates.traded(1) == pytest.approx(1 / (50e9 * 0.8))
    inside = Rates(load_cluster("h100-64"), 8, "bfloat16", BEST)
    assert inside.travel(1) == inside.traded(1) == pytest.approx(1 / (450e9 * 0.8))
    # two replicas of eight shards: each shard is summed by one device of a host
    assert replace(inside, replicas=2).between_replicas(1) == pytest.approx(rates.traded(1))


def test_a_rack_is_joined_over_its_hosts() -> None:
    rack = load_cluster("gb200-144")
    assert (rack.hosts, rack.devices) == (36, 4)
    assert [rack.link(0, n) for n in (4, 72, 73)] == [900e9, 900e9, 50e9]
    assert rack.link(0, 144) == 200e9


@pytest.mark.parametrize(
    ("name", "hosts", "devices"),
    [("h100-1", 1, 1), ("h100-12", 2, 6), ("H100-20", 4, 5), ("a100-40gb-16", 2, 8), ("gb200-8", 2, 4)],
)
def test_any_number_of_a_kind_is_on_as_few_hosts_alike_as_it_needs(
    name: str, hosts: int, devices: int
) -> None:
    cluster = load_cluster(name)
    assert (cluster.hosts, cluster.devices) == (hosts, devices)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("h100", "say how many GPUs: h100-8 or h100-64"),
        ("gb200", "say how many GPUs: gb200-4 or gb200-32"),
        ("a100-40gb", "say how many GPUs: a100-40gb-8 or a100-40gb-64"),
        ("h100-13", "say how many GPUs: h100-8 or h100-16"),
        ("h100-0", "say how many GPUs: h100-8 or h100-64"),
    ],
)
def test_a_kind_wants_a_number(name: str, remedy: str) -> None:
    with pytest.raises(GraphError) as caught:
        load_cluster(name)
    assert str(caught.value) == f"there is no cluster `{name}`\n  {remedy}"


@pytest.mark.slow
def test_memory_is_left_free() -> None:
    plans = [compile_graph("grpo", target=Target("h100-8", margin=margin)) for margin in (None, 0.0, 0.5)]
    peaks = [(plan.peak or {})["main"] for plan in plans]
    assert [peak.free for peak in peaks] == [4_000_000_000, 0, 40_000_000_000]
    assert {peak.capacity for peak in peaks} == {80_000_000_000}
    assert all(peak.fits for peak in peaks) and peaks[2].bytes <= 40e9
    with pytest.raises(GraphError, match=r"may use 8 GB of 80 GB \(72 GB stay free\)"):
        compile_graph("grpo", usual([]), target=Target("h100-8", margin=0.9))


def test_a_file_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((FOLDER / "cpu.yaml").read_text().replace("hosts: 1", "hosts: 3"))
    assert isinstance(load_cluster(str(path)), Cluster)
    assert load_cluster(str(path)).total == 12


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(GraphError) as caught:
        load_cluster("h10-8")
    assert "did you mean `h100-8`?" in str(caught.value) and "h200-8" in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(GraphError, match="can't be read"):
        load_cluster("nowhere.yaml")


def test_every_mistake_is_found_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (FOLDER / "cpu.yaml").read_text().replace("hosts: 1", "hosst: 1").replace("4e9", "much", 1)
    said = refused(path, text)
    line = text.splitlines().index("hosst: 1") + 1
    assert f"{path}:{line}:1" in said and "did you mean `hosts`?" in said
    assert "`cluster` has no `hosts`" in said
    assert "must be a number" in said or "valid number" in said


@pytest.mark.parametrize("change", [("hosts: 1", "hosts: 0"), ("4e9", "-1"), ("0.5e9", "-0.5e9")])
def test_bounds(tmp_path: Path, change: tuple[str, str]) -> None:
    said = refused(tmp_path / "mine.yaml", (FOLDER / "cpu.yaml").read_text().replace(*change, 1))
    assert "must be" in said
