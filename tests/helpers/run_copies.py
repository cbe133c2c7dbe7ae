"""Copies a run's folder with another seed, another setting and other metrics, as runs of a sweep have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlgraph.reports.plan_file import load


def copy_run(
    run_dir: Path, folder: Path, settings: Mapping[str, Any], iterations: int, offset: float
) -> Path:
    """Copy a run as if it had been made with other settings of its graph's top level, such as a seed.

    It gets metrics of so many iterations, which rise from ``offset``, and an evaluation every other one.
    """
    shutil.copytree(run_dir, folder, ignore=shutil.ignore_patterns("checkpoints", "models", "metrics.jsonl"))
    plan = load(run_dir / "plan.json")
    assert plan.origin
    origin = replace(plan.origin, composed={**plan.origin.composed, **settings})
    (folder / "plan.json").write_text(replace(plan, origin=origin).json())
    lines = []
    for step in range(iterations + 1):
        line: dict[str, Any] = {"step": step}
        if step:
            reward = offset + 0.4 * step / iterations
            line |= {"reward/mean": reward, "rollout/length": 5.0 - offset, "time/step": 1.5}
            line |= {"update_policy/loss": -0.01 * step, "tokens/generated": 3000.0}
        if step % 2 == 0:
            line |= {"eval/accuracy": offset + 0.45 * step / iterations, "eval/rows": 500.0, "time/eval": 2.0}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder
