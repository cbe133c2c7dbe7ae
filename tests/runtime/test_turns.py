"""Rewards by turn and credit by turn: runs on one and two devices are one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.runtime.demo_tools import make_model

OPS = Path(__file__).parent / "turn_ops.py"
GRAPH = f"""\
graph: turned
models:
  policy: {{path: model, optimizer: {{lr: 1e-3}}}}
nodes:
  prompts: {{op: data.prompts, files: [data.jsonl], batch: 5}}
  rollout:
    op: rollout.agent
    model: policy
    n: 4
    max_new_tokens: 60
    max_turns: 3
    loop: {{kind: "{OPS}:again"}}
  observed: {{op: mask.observations}}
  lengths: {{op: "{OPS}:lengths", turns: "${{nodes.rollout.max_turns}}"}}
  rewards: {{op: "{OPS}:checked"}}
  advantages: {{op: advantage.turns, in: {{turn_rewards: lengths}}, lam: 0.5}}
  old_logprobs: {{op: logprobs, model: policy}}
  update: {{op: update.policy, model: policy, minibatches: 2, loss: {{kind: ppo_clip}}}}
schedule: {{iterations: 2}}
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the graph, data, and a model that ends its turns."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", seed=0)
    ends = json.loads(Path("model/generation_config.json").read_text())
    ends["eos_token_id"] = [1, *range(8, 288, 8)]
    Path("model/generation_config.json").write_text(json.dumps(ends))
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("turned.yaml").write_text(GRAPH)


@pytest.mark.slow
def test_a_run_on_two_devices_is_that_on_one(run_on_devices: Callable[..., str]) -> None:
    runs = []
    for devices in ("1", "2"):
        run_on_devices("turned.yaml", "--devices", devices, "--run-dir", devices)
        runs.append([json.loads(line) for line in Path(devices, "metrics.jsonl").read_text().splitlines()])
    for one, two in zip(*runs, strict=True):
        assert one["rewards/observed"] > 0 and one["update/grad_norm"] > 0
        for name in ("rewards/observed", "update/loss", "update/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-6), name


def test_a_reward_for_each_turn_has_its_bytes_in_the_plan() -> None:
    plan = compile_graph("turned.yaml", [], 1)
    columns = plan.columns["train"]
    assert (columns["lengths"].type, columns["lengths"].sizes) == ("float32[samples, turns]", (3,))
