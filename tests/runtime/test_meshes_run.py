"""Whole runs on four devices: two replicas of its models, killed and resumed in one copy; shared tokens."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from test_faults import ONE, inline, lines, with_traps

from rlgraph.runtime.replay import replay

pytestmark = pytest.mark.usefixtures("in_demo")
REPLICAS = [f"models.{name}.train.shard=2" for name in ("policy", "ref")]
LENGTH = "schedule={iterations: 4, save_every: 1, record_every: 1}"


@pytest.mark.nightly
def test_replicas_that_are_killed_go_on_in_one_copy_with_the_numbers_of_one_device(
    run_on_devices: Callable[..., str],
) -> None:
    graph, token = with_traps(ONE, main={"policy": 3}), uuid.uuid4().hex
    four = (LENGTH, "--devices", "4", "--run-dir", "a")
    said = run_on_devices(graph, *REPLICAS, *four, expect=1, RLGRAPH_TEST_TOKEN=token)
    assert "run update_policy" in said
    assert "fsdp (float32, 2-way shard x 2 replicas)" in Path("a/plan.txt").read_text()
    saved = max(Path("a/checkpoints").glob("step-*"))
    shards = sorted(path.name for path in (saved / "policy").glob("shard-*"))
    assert shards == ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]
    run_on_devices(graph, "models.policy.train.shard=4", *four, "--resume", RLGRAPH_TEST_TOKEN=token)
    inline(ONE, LENGTH, run_dir="b")
    for there, here in zip(lines("a"), lines("b"), strict=True):
        assert there == pytest.approx(here, rel=1e-4, abs=1e-4)
    assert "update_policy" in str(replay(Path("a"), 4, "update_policy"))  # on one device, whatever the mesh


@pytest.mark.nightly
def test_a_whole_run_on_four_devices_is_that_of_ranks_that_share_nothing(
    run_on_devices: Callable[..., str],
) -> None:
    shared = [f"models.{name}.train.sequence_parallel=2" for name in ("policy", "ref")]
    run_on_devices(ONE, LENGTH, "--devices", "4", "--run-dir", "plain")
    run_on_devices(ONE, LENGTH, "--devices", "4", "--run-dir", "shared", *shared)
    plain, found = lines("plain"), lines("shared")
    assert [line.keys() for line in found] == [line.keys() for line in plain]
    for one, other in zip(plain, found, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-4)
    assert "update_policy" in str(replay(Path("shared"), 4, "update_policy"))  # on one device
