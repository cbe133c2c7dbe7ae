"""Pools that take hosts whole, on nodes of Ray with addresses of their own, one of them with room for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ran import ray_nodes

from rlgraph.compiler import compile_graph
from rlgraph.errors import RunError
from rlgraph.planning.device_groups import together, whole_hosts
from rlgraph.runtime.cluster.cluster import RayCluster
from rlgraph.runtime.cluster.devices import agree, of_ray

ONE = str(Path(__file__).parent / "ones.yaml")
CPUS = {"127.0.0.9": 8, "127.0.0.1": 2, "127.0.0.2": 2}  # the head first; of 8, 4 are devices
pytestmark = [pytest.mark.usefixtures("in_demo"), pytest.mark.nightly]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_nodes(*({"num_cpus": n, "node_ip_address": at} for at, n in CPUS.items())) as address:
        yield address


def test_each_host_of_a_pool_is_another_of_just_its_size(address: str) -> None:
    plan = compile_graph(ONE, ["pools={main: {hosts: 2, devices: 4}}"])
    agree(plan, of_ray(address))
    given: dict[str, Any] = {"together": together(plan), "whole": whole_hosts(plan)}
    cluster = RayCluster(plan.pools, gpus=False, address=address, logs=Path("logs"), timeout=300, **given)
    try:
        called = [cluster.call(place, "place")[0] for place in cluster.places]
        assert [at for _, at, _ in cluster.get(called)] == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2
    finally:
        cluster.close()


@pytest.mark.parametrize(("hosts", "devices"), [(3, 6), (2, 8), (1, 3)])
def test_hosts_that_are_not_there_are_refused_with_those_that_are(
    address: str, hosts: int, devices: int
) -> None:
    plan = compile_graph(ONE, [f"pools={{main: {{hosts: {hosts}, devices: {devices}}}}}"])
    said = rf"pool main takes {hosts} whole hosts of {devices // hosts} devices \(pools.main.hosts\), and "
    said += r"the Ray cluster at [\d.:]+ has hosts of (4, 2, 2|2, 4, 2|2, 2, 4)\n  set pools.main.devices and"
    with pytest.raises(RunError, match=said):
        agree(plan, of_ray(address))
