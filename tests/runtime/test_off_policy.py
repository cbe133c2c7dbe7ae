"""Whole runs of graphs whose rows other weights or another engine sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
APART = "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"
FRESH = "set: {pools: {main: {devices: 1}}, schedule.buffer: {staleness: 0, by: batch}}"
TIS = "add: {rollout_weights: {op: correction.tis}}"
DATA = "demo_files/train.parquet"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def graph(base: str, *edits: str) -> str:
    """A graph file of the demo's model and task, with a reward that any model earns some of."""
    settings = [
        "set: {models.policy: {path: demo_files/model, optimizer: {lr: 1e-3}}}",
        f"replace: {{prompts: {{op: data.prompts, files: [{DATA}], batch: 7, template: plain}}}}",
        "set: {rollout.n: 3, rollout.max_new_tokens: 8, schedule: {iterations: 2}}",
        f"set: {{rewards: {{op: '{HERE / 'ones_ops.py'}:ones'}}}}",
    ]
    body = "".join(f"  - {edit}\n" for edit in (*settings, *edits))
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\nedits:\n{body}")
    return "edited.yaml"


def lines(run_dir: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def alone(base: str, *edits: str, run_dir: str = "alone") -> list[dict[str, float]]:
    run_graph(graph(base, *edits), (), 1, inline=True, run_dir=Path(run_dir))
    return lines(run_dir)


def test_how_far_the_engines_are_apart_is_measured() -> None:
    line = alone("grpo", "set: {update_policy.minibatches: 3}")[-1]
    gap, std, most = (line[f"update_policy/rollout_gap{end}"] for end in ("", "_std", "_max"))
    assert 0 < gap <= most < 1e-4
    assert 0 < std <= (gap * (most - gap)) ** 0.5 * 1.001  # what mean and maximum allow
    assert abs(line["update_policy/rollout_kl"]) < 1e-6
    ratio = alone("grpo", "set: {update_policy.in: {old_logprobs: rollout_logprobs}}", run_dir="ratio")[-1]
    assert "update_policy/rollout_gap" not in ratio


def test_engines_that_agree_are_hardly_corrected() -> None:
    plain = alone("grpo", run_dir="plain")[-1]
    chain = "add: {capped: {op: correction.tis}, rollout_weights: "
    chain += "{op: correction.reject, threshold: 0.1, in: {weights: capped}}}"
    line = alone("grpo", chain)[-1]
    assert line["rollout_weights/weight"] == pytest.approx(1.0, abs=1e-4)
    assert line["rollout_weights/cut"] == line["capped/cut"] == 0
    assert line["update_policy/grad_norm"] == pytest.approx(plain["update_policy/grad_norm"], rel=1e-3)
    reject = "add: {rollout_weights: {op: correction.reject, threshold: 1e-30, kl: k2}}"
    line = alone("grpo", reject, "set: {update_policy.kl_coef: 0}", run_dir="rejected")[-1]
    cut = line["rollout_weights/cut"]  # but for rows on which both engines agree to the bit
    assert cut == pytest.approx(1 - line["rollout_weights/weight"]) and cut >= 0.9
    assert line["rollout_weights/weight"] > 0 or line["update_policy/grad_norm"] == 0


def test_the_decoupled_loss_of_fresh_rows_is_that_of_ppo() -> None:
    alike = "set: {update_policy.kl_coef: 0, update_policy.aggregate: token-mean}"
    ppo, decoupled = alone("grpo", alike, run_dir="ppo"), alone("decoupled_ppo", FRESH)
    for name in ("update_policy/loss", "update_policy/grad_norm", "reward/mean"):
        assert decoupled[-1][name] == pytest.approx(ppo[-1][name], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("base", "edits"),
    [
        ("decoupled_ppo", []),
        ("grpo", [TIS]),
        ("gpg", [TIS, "add: {old_logprobs: {op: logprobs, model: policy}}"]),
    ],
)
def test_rows_of_older_weights_are_measured_and_trained_on(base: str, edits: list[str]) -> None:
    run_graph(graph(base, APART, *edits), (), 2, inline=True, run_dir=Path("stale"))
    first, second = lines("stale")
    # both iterations sample with the weights of the start: only the second has moved on
    assert first["update_policy/rollout_gap_max"] < 1e-4 < second["update_policy/rollout_gap_max"]
    assert second["update_policy/rollout_kl"] > 10 * abs(first["update_policy/rollout_kl"])
    assert first["update_policy/grad_norm"] > 0 and second["update_policy/grad_norm"] > 0
    fresh = alone(base, FRESH, *edits)
    assert first["update_policy/loss"] == pytest.approx(fresh[0]["update_policy/loss"], rel=1e-3, abs=1e-5)
