"""Several sources by weight, filtered: a resumed run sees the rows that an undisturbed one sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlgraph.runtime.run import run_graph

ONES = str(Path(__file__).parent / "ones.yaml")
MIXED = """graph: mixed
extends: ONES
edits:
  - remove: [eval]
  - set:
      prompts.files: {first: [first.jsonl], second: [second.jsonl]}
      prompts.weights: {first: 2, second: 1}
      prompts.where: {keep: true}
      schedule: {iterations: 4, save_every: 2}
"""


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()  # paths are relative to the graph's file
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "keep": i % 3 > 0} for i in range(10, 40)]
    for name, part in (("first", rows[:8]), ("second", rows[8:])):
        Path(f"sub/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    Path("sub/mixed.yaml").write_text(MIXED.replace("ONES", ONES))


def measured(folder: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if not n.startswith(("time/", "perf/"))} for line in lines]


def test_a_resumed_run_goes_on_across_epochs_of_its_sources() -> None:
    run_graph("sub/mixed.yaml", (), 1, run_dir=Path("whole"), inline=True)
    run_graph("sub/mixed.yaml", (), 1, run_dir=Path("cut"), inline=True, steps=2)
    run_graph("sub/mixed.yaml", (), 1, run_dir=Path("cut"), inline=True, resume=True)
    assert measured("cut") == measured("whole")
    assert measured("whole")[0]["data/filtered"] == pytest.approx(1 / 3)
    weights = [Path(run, "models/policy/model.safetensors").read_bytes() for run in ("cut", "whole")]
    assert weights[0] == weights[1]
