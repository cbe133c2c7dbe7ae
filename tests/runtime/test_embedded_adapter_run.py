"""Runs whose embedded engine is synced by the adapter alone find what those with merged weights do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlgraph.runtime.run import run_graph

POOLS = ("pools={train: {devices: 1}, gen: {devices: 1}}", "models.policy.serve.pool=gen")
STALE = (
    *POOLS,
    "schedule.buffer={staleness: 1, by: batch}",
    "update_policy.in.old_logprobs=rollout_logprobs",
)


@pytest.mark.parametrize("more", [(), POOLS, STALE], ids=["together", "apart", "stale"])
def test_a_run_is_the_same_as_with_merged_weights(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    settings = [
        "models.policy={path: demo_files/model, optimizer: {lr: 3e-2}, train: {lora: {rank: 2, alpha: 8}}}",
        "prompts={op: data.prompts, files: [demo_files/train.parquet], batch: 4, template: plain}",
        "models.ref.path=demo_files/model",
        f"rewards={{op: '{Path(__file__).parent / 'ones_ops.py'}:ones'}}",
    ]
    edits = "".join(f"  - replace: {{{s.replace('=', ': ', 1)}}}\n" for s in (settings[1], settings[3]))
    Path("edited.yaml").write_text(f"graph: edited\nextends: grpo\nedits:\n{edits}")
    short = ("rollout.n=3", "rollout.max_new_tokens=8", "schedule.iterations=3", "update_policy.kl_coef=0.1")
    own, found = (settings[0], settings[2], *short, *more), {}
    for way in ("merged", "adapter"):
        chosen = (*own, f"models.policy.serve.lora={way}")
        run_graph("edited.yaml", chosen, None if more else 1, inline=True, run_dir=Path(way))
        lines = [json.loads(line) for line in Path(way, "metrics.jsonl").read_text().splitlines()]
        timed = ("time/", "memory/", "tokens/", "perf/")
        found[way] = [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]
        assert ("its adapter alone" in Path(way, "plan.txt").read_text()) == (way == "adapter")
    assert found["adapter"] == found["merged"] and len(found["adapter"]) == 3
    assert found["adapter"][-1]["update_policy/kl_ref"] > 0
