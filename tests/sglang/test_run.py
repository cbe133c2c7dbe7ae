"""Whole runs that generate with a real SGLang on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlgraph.runtime.demo import make

ONES = Path(__file__).parent.parent / "runtime" / "ones.yaml"
TWO = ONES.with_name("ones_two.yaml")
SGLANG = ["models.policy.serve.engine=sglang", "schedule.iterations=3"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make(folder / "demo_files")
    return folder / "demo_files"


def run(files: Path, folder: Path, graph: Path, *args: str) -> list[dict[str, Any]]:
    """A run in a process of its own; its metrics."""
    command = [sys.executable, "-m", "rlgraph", "run", str(graph), *SGLANG, *args, "--run-dir", str(folder)]
    env = os.environ | {"RLGRAPH_TEST_FILES": str(files)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_sane(lines: list[dict[str, Any]]) -> None:
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 3
    for line in steps:
        assert line["update_policy/grad_norm"] > 0
        # the two engines score the same tokens alike (where both do: old_logprobs may be the rollout's own)
        assert line.get("update_policy/rollout_gap_max", 0.0) < 1e-4


@pytest.mark.parametrize(
    ("graph", "args"),
    [
        (ONES, ("--inline",)),
        (ONES, ("--devices", "2", "models.policy.serve.tensor_parallel=2")),
        (TWO, ("schedule.staleness=1", "update_policy.in.old_logprobs=rollout_logprobs")),
    ],
    ids=["inline", "tensor parallel 2", "two pools, one ahead"],
)
def test_a_run_generates_with_sglang(files: Path, tmp_path: Path, graph: Path, args: tuple[str, ...]) -> None:
    assert_sane(run(files, tmp_path / "run", graph, *args))
    assert [*(tmp_path / "run" / "logs").glob("sglang-*.log")]
