"""Runs in which an agent of the user's own, over HTTP, writes what the policy is trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlgraph.runtime.demo_tools import make_model

GRAPH = """\
graph: mine
models:
  policy: {path: model, optimizer: {lr: 1e-3}}
nodes:
  prompts: {op: data.prompts, files: [data.jsonl], batch: 4}
  rollout: {op: rollout.harness, model: policy, n: 2, run: "mine.py:solve", max_tokens: 200}
  credit: {op: advantage.grpo, in: {rewards: episode_rewards, loss_mask: episode_mask}}
  segments: {op: segment.paths, most: 3}
  advantages: {op: segment.align, in: {values: credit, segment_mask: loss_mask}}
  old_logprobs: {op: logprobs, model: policy}
  update: {op: update.policy, model: policy, loss: {kind: ppo_clip}}
schedule: {iterations: 2}
"""
MINE = '''
import json
import urllib.request


async def solve(task, base_url, api_key):
    """Ask twice, and a third time as if nothing had been said before."""
    question = {"role": "user", "content": task["question"]}
    messages = [question]
    for _ in range(2):
        message = ask(base_url, api_key, messages)
        messages += [{**message, "content": message["content"] + " "}, {"role": "user", "content": "again"}]
    last = ask(base_url, api_key, [{"role": "user", "content": "other"}, question])
    return {"reward": len(last["content"]) % 3, "asked": 3}


def ask(base_url, api_key, messages):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 6}).encode()
    request = urllib.request.Request(
        f"{base_url}/chat/completions", body, {"authorization": f"Bearer {api_key}"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]
'''


@pytest.fixture
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", seed=0)
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(GRAPH)


def metrics(run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("_mine")
def test_an_agent_trains_the_same_on_one_device_and_on_two(run_on_devices: Callable[..., str]) -> None:
    for devices in ("1", "2"):
        run_on_devices("mine.yaml", "--devices", devices, "--run-dir", devices)
    for one, two in zip(metrics("1"), metrics("2"), strict=True):
        assert one["rollout/turns"] == 3
        assert one["rollout/segments"] == 2  # the third request goes on with nothing
        assert one["endpoint/segments/first"] == one["endpoint/segments/another"] == 1
        assert one["episode/asked"] == 3
        assert one["update/rollout_gap_max"] < 1e-4  # the train engine reads what the serve engine wrote
        for name in ("reward/mean", "rollout/length", "tokens/generated", "endpoint/failed"):
            assert two[name] == one[name], name
        assert two["update/grad_norm"] == pytest.approx(one["update/grad_norm"], rel=1e-3)
