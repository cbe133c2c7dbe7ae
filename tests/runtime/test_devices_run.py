"""A whole run on the far device (``helpers/far.py``): conversations with tools, and an update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import far
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.worker.worker import Worker

SETTINGS = ["models.policy.path=demo_tool_files/model", "rollout.n=2", "rollout.max_new_tokens=3"]
SETTINGS += ["prompts.batch=3", "update_policy.minibatches=2", "update_policy.entropy_coef=0.1"]
SETTINGS += ["eval.nodes.prompts.batch=2", "schedule.save_every=1"]


@pytest.mark.slow
def test_a_run_has_the_metrics_of_the_cpu(
    tool_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_tool_files").symlink_to(tool_files / "demo_tool_files")
    start = Worker.__init__
    lines = []

    for device in (far.CPU, far.DEVICE):

        def started(self: Worker, *args: Any, device: str = device.type, **options: Any) -> None:
            start(self, *args, **options)
            self.device = device

        monkeypatch.setattr(Worker, "__init__", started)
        with far.device() as seen:
            run_graph("calculator_tool", SETTINGS, 1, steps=1, inline=True, run_dir=Path(device.type))
        assert (seen.host_bytes > 0) == (device == far.DEVICE)
        assert Path(device.type, "models/policy/model.safetensors").is_file()
        lines.append(json.loads(Path(device.type, "metrics.jsonl").read_text().splitlines()[-1]))
    near, there = lines
    assert there["update_policy/grad_norm"] > 0
    for name, value in near.items():
        if not name.startswith(("time/", "perf/")):
            wanted = pytest.approx(value, rel=1e-3, abs=1e-4) if value is not None else None
            assert there[name] == wanted, name
