"""A tensor-parallel group is never over two hosts, whether the plan knows the hosts or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.hardware import FOLDER
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.planning.device_groups import together

GRAPH = """graph: apart
extends: ppo
edits:
  - add: {POOLS}
  - remove: [pools.main]
  - set: {models.policy.train.pool: a, models.ref.train.pool: a, models.critic.train.pool: b}
  - set: {models.policy.serve.pool: gen, models.policy.serve.engine: sglang}
  - set: {models.policy.serve.tensor_parallel: SIZE}
"""


def planned(folder: Path, pools: dict[str, int], size: int, target: Target | None) -> Plan:
    """The plan of a graph whose servers span ``size`` devices of pool ``gen``."""
    added = ", ".join(f"pools.{name}: {{devices: {count}}}" for name, count in pools.items())
    path = folder / "apart.yaml"
    path.write_text(GRAPH.replace("POOLS", added).replace("SIZE", str(size)))
    return compile_graph(str(path), devices=sum(pools.values()), target=target)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Target:
    """Two hosts of eight H100."""
    path = tmp_path / "two.yaml"
    path.write_text((FOLDER / "h100-8.yaml").read_text().replace("hosts: 1", "hosts: 2"))
    return Target(str(path))


@pytest.mark.parametrize(
    ("pools", "size"),
    [
        ({"a": 6, "b": 6, "gen": 4}, 4),
        ({"gen": 8, "a": 4, "b": 4}, 8),
        ({"a": 1, "b": 1, "gen": 4}, 4),  # not at a multiple of 4, and still on one host
    ],
)
def test_groups_inside_hosts_are_planned(
    tmp_path: Path, two_hosts: Target, pools: dict[str, int], size: int
) -> None:
    plan = planned(tmp_path, pools, size, two_hosts)
    assert together(plan) == {**dict.fromkeys(pools, 1), "gen": size}
    assert not any("assumed to have" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("pools", "size", "first"),
    [({"a": 6, "gen": 4, "b": 6}, 4, 6), ({"gen": 12, "a": 2, "b": 2}, 3, 6)],
)
def test_a_group_over_two_hosts_is_named(
    tmp_path: Path, two_hosts: Target, pools: dict[str, int], size: int, first: int
) -> None:
    with pytest.raises(GraphError) as caught:
        planned(tmp_path, pools, size, two_hosts)
    said = str(caught.value)
    assert f"devices {first} to {first + size - 1}, a group of `policy`" in said
    assert "over hosts 0 and 1 of h100-8, which have 8 devices each" in said
    assert ("divides 8" in said) == (size == 3)


def test_without_a_cluster_hosts_are_assumed_to_hold_whole_groups(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"a": 6, "b": 6, "gen": 4}, 4, None)
    assert "hosts are assumed to have a multiple of 4 devices, for the servers of `policy`" in plan.notes
    with pytest.raises(GraphError, match=r"begin at device 6(.|\n)*multiple of 4(.|\n)*--cluster"):
        planned(tmp_path, {"a": 6, "gen": 4, "b": 6}, 4, None)


def test_engines_of_one_device_need_no_host_of_their_own(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"a": 1, "gen": 3, "b": 1}, 1, None)
    assert together(plan) == {"a": 1, "gen": 1, "b": 1}
    assert not any("assumed to have" in note for note in plan.notes)
