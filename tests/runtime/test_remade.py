"""Prompts made of samples: what is said of them is read with the samples, on any number of devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.printing.plan_text import plan_text
from share import rest_nightly

HERE = Path(__file__).parent
GRAPH = f"""
graph: remade
extends: {HERE / "ones.yaml"}
edits:
  - remove: [eval]
  - set: {{schedule: {{iterations: 2}}, prompts.tokenizer: policy}}
  - add:
      models.critic: {{path: "${{models.policy.path}}", frozen: true}}
      mine: {{op: "{HERE / "remade_prompts.py"}:number"}}
      ask: {{op: "{HERE / "remade_prompts.py"}:ask"}}
      verdicts: {{op: rollout, model: critic, n: 3, max_new_tokens: 5, in: {{prompt: asked}}, out: {{
        tokens: verdict_tokens, loss_mask: verdict_mask, rollout_logprobs: verdict_logprobs,
        responses: verdict, group: verdict_group, truncated: verdict_truncated}}}}
      sizes: {{op: "{HERE / "remade_ops.py"}:sizes", in: {{responses: verdict}}}}
      said: {{op: group.mean, in: {{values: sizes, group: verdict_group}}}}
      met: {{op: "{HERE / "remade_ops.py"}:met"}}
  - set: {{advantages.in: {{rewards: met}}}}
"""
COMPARED = ("met/checked", "sizes/read", "update_policy/loss", "update_policy/grad_norm")


def lines(run_dir: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
def test_what_is_said_of_verdicts_meets_the_response_they_are_about(
    run_on_devices: Callable[..., str],
) -> None:
    Path("remade.yaml").write_text(GRAPH)
    for devices in ("1", "2"):
        run_on_devices("remade.yaml", "--devices", devices, "--run-dir", devices)
    for one, two in zip(lines("1"), lines("2"), strict=True):
        assert one["met/checked"] == one["sizes/read"] == 1 and one["update_policy/grad_norm"] > 0
        for name in COMPARED:
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-6), name


@pytest.mark.usefixtures("in_demo")
def test_the_plan_says_what_is_brought_back() -> None:
    Path("remade.yaml").write_text(GRAPH)
    plan = compile_graph("remade.yaml", [], 2)
    assert plan.columns["train"]["said*samples"].type == "float32[samples]"
    assert plan.columns["train"]["met"].domain == "samples"  # not the verdicts'
    assert "`said` is of rows made of samples, one for each" in " ".join(plan_text(plan).split())


ONES = f"rewards.op={HERE / 'ones_ops.py'}:ones"
HINTED = ("hinted.template=plain", "hinted.prompt='{hint} {question}'")
ASKED = ("asked.template=plain", "asked.prompt='{question}{response}='")
SETTINGS = {
    "sdft": HINTED,
    "sdpo": (*HINTED, ONES, "peers.least=0.2"),
    "process_rewards": ("models.prm.path=demo_files/model", "steps.end='1'"),
    "erl": (
        *ASKED,
        ONES,
        f"retry_{ONES}",
        "learnt.template=plain",
        "retry.max_new_tokens=6",
        "known.min=0.2",
    ),
    "game": (*ASKED, ONES, "praised.pattern='[0-4].*'"),
}
DEMO = """
graph: small
extends: {graph}
edits:
  - set: {{models.policy: {{path: demo_files/model, optimizer: {{lr: 1e-3}}}}, schedule: {{iterations: 2}}}}
  - set: {{prompts: {{op: data.prompts, files: [demo_files/train.parquet], batch: 5, template: plain,
      tokenizer: policy}}, rollout.n: 4, rollout.max_new_tokens: 6}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("graph", rest_nightly(SETTINGS, lambda graph: graph in ("sdft", "game")))
def test_a_recipe_trains_alike_on_one_and_two_devices(
    graph: str,
    demo_files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_on_devices: Callable[..., str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    Path("small.yaml").write_text(DEMO.format(graph=graph))
    for devices in ("1", "2"):
        run_on_devices("small.yaml", *SETTINGS[graph], "--devices", devices, "--run-dir", devices)
    for one, two in zip(lines("1"), lines("2"), strict=True):
        updates = [name for name in one if name.endswith("/grad_norm")]
        assert all(one[name] > 0 for name in updates) or graph in ("sdft", "sdpo"), one
        for name in (*updates, *(name.replace("grad_norm", "loss") for name in updates)):
            assert two[name] == pytest.approx(one[name], rel=5e-3, abs=1e-5), name
