"""Whole runs of ReMax: two rollouts of the same prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
EDITED = f"""
graph: edited
extends: remax
edits:
  - set: {{models.policy: {{path: demo_files/model, optimizer: {{lr: 1e-3}}}}, schedule: {{iterations: 2}}}}
  - set: {{prompts: {{op: data.prompts, files: [demo_files/train.parquet], batch: 7, template: plain}}}}
  - set: {{rollout.n: 3, rollout.max_new_tokens: 8, rewards: {{op: '{HERE / "ones_ops.py"}:recorded_ones'}}}}
  - set: {{greedy_rewards.op: '{HERE / "ones_ops.py"}:recorded_ones'}}
  - add: {{aligned: {{op: 'mine.py:aligned'}}}}
  - set: {{shaped.in: {{rewards: aligned}}}}
"""
OPS = """
from rlgraph.ops import Context, float32, int64, op, samples, text


@op()
def aligned(
    ctx: Context, rewards: float32[samples], group: int64[samples], greedy_group: int64[samples],
    responses: text[samples], greedy_responses: text[samples],
) -> float32[samples]:
    '''The rewards as they are: whether each sample meets the greedy one of its own prompt is recorded.'''
    ctx.record("meets", (group == greedy_group).float())
    ctx.record("differs", [float(a != b) for a, b in zip(responses, greedy_responses)])
    return rewards
"""


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    Path("mine.py").write_text(OPS)
    Path("edited.yaml").write_text(EDITED)


def lines(run_dir: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_remax_trains_alike_on_one_and_two_ranks_and_each_sample_meets_its_greedy_one(
    run_on_devices: Callable[..., str],
) -> None:
    run_graph("edited.yaml", (), 1, inline=True, run_dir=Path("one"))
    run_on_devices("edited.yaml", "--devices", "2", "--run-dir", "two")
    for line, other in zip(lines("one"), lines("two"), strict=True):
        assert line["aligned/meets"] == 1.0 and line["aligned/differs"] > 0
        assert line["update_policy/grad_norm"] > 0
        # a mean is of one node, tokens are added up: of 21 samples and of 7 greedy ones
        assert 0 <= line["greedy_rewards/reward/mean"] <= 2
        expected = 21 * line["rollout/length"] + 7 * line["greedy/rollout/length"]
        assert line["tokens/generated"] == pytest.approx(expected)
        for name in line.keys() - {name for name in line if name.startswith(("time/", "perf/"))}:
            assert other[name] == pytest.approx(line[name], rel=1e-4, abs=1e-4), name
