"""Clusters: those that are shipped, those in files, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.costs.detect import load_cluster
from rlgraph.costs.hardware import FOLDER, Cluster, shipped_clusters
from rlgraph.errors import GraphError

DEVICES = {"cpu": 4, "h100-8": 8, "h200-8": 8, "h100-64": 64, "h100-1024": 1024}


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(GraphError) as caught:
        load_cluster(str(path))
    return str(caught.value)


def test_the_shipped_clusters() -> None:
    assert {name: load_cluster(name).total for name in shipped_clusters()} == DEVICES


@pytest.mark.parametrize("name", shipped_clusters())
def test_a_cluster_is_named_after_its_file(name: str) -> None:
    assert load_cluster(name).cluster == name


def test_devices_of_one_generation_differ_in_hosts_alone() -> None:
    small, large = load_cluster("h100-8"), load_cluster("h100-1024")
    assert large == small.model_copy(update={"cluster": "h100-1024", "hosts": 128})


def test_the_slowest_link_decides() -> None:
    cluster = load_cluster("h100-64")
    assert [cluster.link(0, devices) for devices in (1, 8, 9, 64)] == [450e9, 450e9, 50e9, 50e9]
    assert [cluster.link(first, 4) for first in (0, 4, 6, 8)] == [450e9, 450e9, 50e9, 450e9]


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
