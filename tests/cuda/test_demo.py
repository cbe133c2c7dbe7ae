"""``rlgraph run --inline`` from the graph to the exported model, on a device, without Ray and SGLang."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.costs.detect import rates_of
from rlgraph.runtime.demo import questions
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.worker.worker import Worker

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _folder(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions in an empty folder, and workers on the device."""
    monkeypatch.chdir(tmp_path)
    for name, rows in zip(("train", "test"), questions(0), strict=True):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:16]))
    own = Worker.__init__

    def placed(self: Worker, *args: Any, **options: Any) -> None:
        own(self, *args, **options)
        self.device = device.type

    monkeypatch.setattr(Worker, "__init__", placed)


def train(graph: str, settings: Mapping[str, Any], steps: int) -> list[dict[str, float]]:
    """The metrics of each iteration of a run that exported its model."""
    serve = {"models.policy.serve.engine": "transformers", "eval.nodes.prompts.files": "[test.jsonl]"}
    pairs = [f"{name}={value}" for name, value in (settings | serve).items()]
    folder = run_graph(graph, pairs, 1, steps=steps, run_dir=Path(graph), inline=True)
    assert (folder / "models/policy/model.safetensors").is_file()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["step"]]


@pytest.mark.slow
def test_it_learns_from_examples_and_then_from_rewards(device: torch.device, model: str) -> None:
    sft = {
        "models.policy.path": model,
        "models.policy.train.dtype": "float32",
        "examples.files": "[train.jsonl]",
    }
    losses = [line["update_policy/loss"] for line in train("demo_sft", {**sft, "examples.batch": 16}, 6)]
    assert losses[-1] < losses[0] - 0.2
    learnt = str(Path("demo_sft/models/policy").resolve())
    dtype = "bfloat16" if device.type == "cuda" else "float32"  # the far device shards nothing
    grpo = {
        "models.policy.path": learnt,
        "models.policy.train.dtype": dtype,
        "prompts.files": "[train.jsonl]",
    }
    lines = train("demo", {**grpo, "prompts.batch": 4, "rollout.n": 4}, 2)
    names = ("update_policy/loss", "update_policy/grad_norm", "reward/mean")
    assert all(math.isfinite(line[name]) for line in lines for name in names)
    if device.type == "cuda" and rates_of(torch.cuda.get_device_name()):
        assert all(0 < line["perf/mfu/update_policy"] < 1 for line in lines)
