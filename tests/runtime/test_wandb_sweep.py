"""The sweep of docs/tuning.md, sent by `wandb sweep` and carried out by `wandb agent`, trains and logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from wandb_service import OPEN, SweepService, serving

ONES = Path(__file__).parent / "ones.yaml"
MINE = f"""
graph: mine
extends: {ONES}
edits:
  - set: {{prompts.batch: 2, rollout.n: 2, update_policy.minibatches: 1, schedule.iterations: 2}}
  - set: {{eval.nodes.prompts.batch: 4, eval.every: 1}}
"""
LR, CLIP = "models.policy.optimizer.lr", "update_policy.loss.clip"
RUNS = {
    "first": {CLIP: 0.1, LR: 1e-06},
    "second": {CLIP: 0.2, LR: 3.3e-6, "schedule.iterations": 100_000, "eval.before": False},
}


def sweep_of_the_documents() -> str:
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    return text.split("```yaml\n# sweep.yaml")[1].split("\n", 1)[1].split("```")[0]


def wandb(url: str, *args: str) -> str:
    """`wandb`, where nobody's settings are; runs are offline, as the service takes none."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(Path.cwd()),
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": OPEN,
    }
    command = [sys.executable, "-m", "wandb", *args]
    with open("said.txt", "w+") as said:  # no pipe: a run that is left by its agent would hold it open
        done = subprocess.run(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
        said.seek(0)
        text = said.read()
    assert done.returncode == 0, text
    return text


@pytest.mark.nightly
def test_the_agent_of_wandb_trains_what_the_service_says(in_demo: None) -> None:
    pytest.importorskip("wandb", exc_type=ImportError)
    sweep = yaml.safe_load(sweep_of_the_documents())
    assert {*RUNS["first"]} == {*sweep["parameters"]}
    sweep["command"][2] = sweep["command"][2].replace(
        "rlgraph run", "WANDB_MODE=offline rlgraph run --inline"
    )
    Path("my.yaml").write_text(MINE)
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    stop = Path("runs/second/samples/step-000001-eval.jsonl")
    service = SweepService(RUNS, stops={"second": stop})
    with serving(service) as url:
        assert "wandb agent team/mine/sweep1" in wandb(url, "sweep", "--project", "mine", "sweep.yaml")
        said = wandb(url, "agent", "team/mine/sweep1")
    assert service.started == [*RUNS], said
    for name, values in RUNS.items():
        (log,) = Path("runs", name, "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")
        written = log.read_bytes()
        assert b"eval/accuracy" in written and b"sweep1" in written
        graph = Path("runs", name, "graph.yaml").read_text()
        assert f"clip: {values[CLIP]}" in graph and f"lr: {values[LR]}" in graph
    steps = [json.loads(line)["step"] for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]
    # what the service stops keeps a checkpoint and may go on
    assert "Stop: second" in said and "continue with: rlgraph resume runs/second" in said
    assert [*Path("runs/second/checkpoints").glob("restart-*")]
