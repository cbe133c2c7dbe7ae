"""Runs whose reference follows the policy: what it holds, when, on each rank, and after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
DATA = "demo_files/train.parquet"
ONE = "set: {pools: {main: {devices: 1}}}"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def graph(*edits: str) -> str:
    """A graph file of the demo's model and task, with a reward that any model earns some of."""
    settings = [
        "set: {models.policy: {path: demo_files/model, optimizer: {lr: 1e-3}}}",
        f"replace: {{prompts: {{op: data.prompts, files: [{DATA}], batch: 4, template: plain}}}}",
        "set: {rollout.n: 3, rollout.max_new_tokens: 6, schedule: {iterations: 4, save_every: 1, keep: 9}}",
        f"set: {{rewards: {{op: '{HERE / 'ones_ops.py'}:ones'}}, update_policy.minibatches: 1}}",
    ]
    body = "".join(f"  - {edit}\n" for edit in (*settings, *edits))
    Path("edited.yaml").write_text(f"graph: edited\nextends: grpo\nedits:\n{body}")
    return "edited.yaml"


def ran(path: str, run_dir: str, steps: int | None = None, resume: bool = False) -> list[dict[str, Any]]:
    run_graph(path, (), 2, inline=True, steps=steps, run_dir=Path(run_dir), resume=resume)
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]


def versions(run_dir: str) -> list[dict[str, int]]:
    """After each iteration."""
    states = sorted(Path(run_dir, "checkpoints").glob("*/state.json"))
    return [json.loads(state.read_text())["versions"] for state in states]


def checkpoint(run_dir: str, iteration: int, model: str = "policy") -> dict[str, Any]:
    """The weights of a model after an iteration, by their names."""
    path = f"{run_dir}/checkpoints/step-{iteration:06d}/{model}/shard-00000-of-00001.safetensors"
    return {n.removeprefix("model."): w for n, w in load_file(path).items() if n.startswith("model.")}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def test_a_reference_is_refreshed_and_part_of_checkpoints() -> None:
    refresh = "add: {refresh: {op: update.copy, model: ref, of: policy@next, every: 2}}"
    path = graph(ONE, refresh)
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
    ran(graph(ONE, refresh), "soft", steps=2)
    base, first = load_file("demo_files/model/model.safetensors"), checkpoint("soft", 1)
    # `of: policy` are the weights before the update: those that the run began with, then those of iteration 1
    assert same(checkpoint("soft", 1, "ref"), base)
    for name, value in checkpoint("soft", 2, "ref").items():
        assert value.allclose(0.75 * base[name] + 0.25 * first[name], rtol=0, atol=1e-6)


def test_each_rank_copies_its_shard() -> None:
    refresh = "add: {refresh: {op: update.copy, model: ref, of: policy@next}}"
    path = graph("set: {schedule: {iterations: 1}}", refresh)
    run_graph(path, (), 2, run_dir=Path("two"))
    for rank in (0, 1):
        ref, policy = (
            load_file(f"two/checkpoints/step-000001/{model}/shard-0000{rank}-of-00002.safetensors")
            for model in ("ref", "policy")
        )
        assert all(value.equal(policy[name]) for name, value in ref.items())
        assert {name for name in policy if name.startswith("model.")} == {*ref}
