"""Runs whose reference follows the policy: what it holds, when, on each rank, and after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cadenced import checkpoint, graph, ran, same, versions
from safetensors.torch import load_file

from rlgraph.runtime.run import run_graph

ONE = "set: {pools: {main: {devices: 1}}}"
STEP = "set: {update_policy.minibatches: 1}"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def test_a_reference_is_refreshed_and_part_of_checkpoints() -> None:
    refresh = "add: {refresh: {op: update.copy, model: ref, of: policy@next, every: 2}}"
    path = graph("grpo", STEP, ONE, refresh)
    lines = ran(path, "whole")
    gaps = [line["update_policy/kl_ref"] for line in lines]
    # in iterations 1 and 3 the reference is what the policy is, up to the engines' rounding
    assert max(abs(gaps[0]), abs(gaps[2])) < 1e-6 < min(gaps[1], gaps[3])
    assert [(v["policy"], v["ref"]) for v in versions("whole")] == [(1, 0), (2, 1), (3, 1), (4, 2)]
    assert same(checkpoint("whole", 2, "ref"), checkpoint("whole", 2))
    for later in (3, 4):
        shutil.rmtree(f"whole/checkpoints/step-{later:06d}")
    assert ran(path, "whole", resume=True) == lines


def test_a_reference_may_follow_softly() -> None:
    refresh = "add: {refresh: {op: update.copy, model: ref, of: policy, mix: 0.25}}"
    ran(graph("grpo", STEP, ONE, refresh), "soft", steps=2)
    base, first = load_file("demo_files/model/model.safetensors"), checkpoint("soft", 1)
    # `of: policy` are the weights before the update: those that the run began with, then those of iteration 1
    assert same(checkpoint("soft", 1, "ref"), base)
    for name, value in checkpoint("soft", 2, "ref").items():
        assert value.allclose(0.75 * base[name] + 0.25 * first[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_each_rank_copies_its_shard() -> None:
    refresh = "add: {refresh: {op: update.copy, model: ref, of: policy@next}}"
    path = graph("grpo", STEP, "set: {schedule: {iterations: 1}}", refresh)
    run_graph(path, (), 2, run_dir=Path("two"))
    for rank in (0, 1):
        ref, policy = (
            load_file(f"two/checkpoints/step-000001/{model}/shard-0000{rank}-of-00002.safetensors")
            for model in ("ref", "policy")
        )
        assert all(value.equal(policy[name]) for name, value in ref.items())
        assert {name for name in policy if name.startswith("model.")} == {*ref}
