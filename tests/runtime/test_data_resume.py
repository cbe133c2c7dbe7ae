"""Several sources by weight, filtered: a resumed run sees the rows that an undisturbed one sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.printing.plan_text import plan_text
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
MIXED = """graph: mixed
extends: BASE
edits:
  - remove: [EVAL]
  - set:
      prompts.files: {first: [first.jsonl], second: [second.jsonl]}
      prompts.weights: WEIGHTS
      prompts.where: {keep: true}
      schedule: {iterations: 4, save_every: 2}
"""
FIXED = "{first: 2, second: 1}"
COURSE = "{first: {linear: [1, 0], over: 3}, second: {steps: {1: 0, 3: 1}}}"

OWN = """
from rlgraph.nodes.data.prompts import Prompts
from rlgraph.ops import op

@op(makes="prompts", rows="all", roles={"rows": "size"})
def own(*, size: int = 7) -> Prompts: ...
"""


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()  # paths are relative to the graph's file
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "keep": i % 3 > 0} for i in range(10, 40)]
    for name, part in (("first", rows[:8]), ("second", rows[8:])):
        Path(f"sub/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def mixed(weights: str, base: str = "ones", removed: str = "eval") -> str:
    text = MIXED.replace("BASE", str(HERE / f"{base}.yaml")).replace("WEIGHTS", weights)
    Path("sub/mixed.yaml").write_text(text.replace("EVAL", removed))
    return "sub/mixed.yaml"


def measured(folder: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if not n.startswith(("time/", "perf/"))} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [FIXED, COURSE])
@pytest.mark.parametrize(("base", "removed"), [("ones", "eval"), ("refilled", "")])
def test_a_resumed_run_goes_on_across_epochs_of_its_sources(base: str, removed: str, weights: str) -> None:
    path = mixed(weights, base, removed)
    run_graph(path, (), 1, run_dir=Path("whole"), inline=True)
    run_graph(path, (), 1, run_dir=Path("cut"), inline=True, steps=2)
    run_graph(path, (), 1, run_dir=Path("cut"), inline=True, resume=True)
    assert measured("cut") == measured("whole")
    assert measured("whole")[0]["data/filtered"] == pytest.approx(1 / 3)
    trained = [Path(run, "models/policy/model.safetensors").read_bytes() for run in ("cut", "whole")]
    assert trained[0] == trained[1]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_weights_follow_their_course(devices: int, run_on_devices: Callable[..., str]) -> None:
    run_on_devices(mixed(COURSE), "--devices", str(devices), "--run-dir", "run")
    lines = measured("run")
    assert [line["prompts/weights.first"] for line in lines] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert [line["prompts/weights.second"] for line in lines] == [0, 0, 1, 1]
    rows = {"first": [7, 14, 16, 16], "second": [0, 0, 5, 12]}  # of 7 in iteration 3 a quarter, 1.75
    for name, size in (("first", 6), ("second", 14)):
        taken = [line[f"data/epoch/{name}"] * size for line in lines]
        assert taken == pytest.approx(rows[name], abs=1e-6)


def test_weights_go_by_rows_where_a_filter_asks_for_more() -> None:
    run_graph(mixed(COURSE, "refilled", ""), (), 1, run_dir=Path("run"), inline=True)
    weights = [line["prompts/weights.first"] for line in measured("run")]
    assert (
        weights[0] > weights[1] and weights[-1] == 0 and min(line["mixed/rounds"] for line in measured("run"))
    )
    assert any(now < plain - 1e-6 for now, plain in zip(weights, (1, 2 / 3, 1 / 3, 0), strict=True))


def test_a_filter_of_prompts_follows_its_course_and_asks_for_more() -> None:
    path, most = mixed(FIXED), "{steps: {1: 28, 3: 50}}"
    easy = f"{{easy: {{op: '{HERE}/refill_ops.py:small', most: {most}, refill: true}}}}"
    Path(path).write_text(f"{Path(path).read_text()}  - add: {easy}\n  - set: {{rollout.rows: easy}}\n")
    run_graph(path, (), 1, run_dir=Path("whole"), inline=True)
    run_graph(path, (), 1, run_dir=Path("cut"), inline=True, steps=2)
    run_graph(path, (), 1, run_dir=Path("cut"), inline=True, resume=True)
    assert measured("cut") == (lines := measured("whole"))
    assert [line["easy/most"] for line in lines] == [28, 28, 50, 50]
    assert all(line["rows/answer"] <= line["easy/most"] for line in lines)
    assert lines[2]["rows/answer"] > 28 and max(line["easy/rounds"] for line in lines) > 1


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_of_epochs_takes_all_rows_so_often(devices: int, run_on_devices: Callable[..., str]) -> None:
    path, cosine = mixed("null"), "models.policy.optimizer.schedule=cosine"
    settings = (path, "schedule={epochs: 1.5, save_every: 2}", cosine, "--devices", str(devices))
    run_on_devices(*settings, "--run-dir", "run")
    lines = measured("run")
    assert [line["data/epoch"] for line in lines] == pytest.approx([7 * n / 20 for n in range(1, 6)])
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["schedule"]["iterations"] == 5 and plan["models"]["policy"]["optimizer"]["total_steps"] == 15
    assert lines[-1]["update_policy/lr"] < lines[1]["update_policy/lr"]


def test_a_run_of_epochs_resumes_and_is_that_of_its_saved_plan() -> None:
    path, settings = mixed(FIXED), ("schedule={epochs: 1, save_every: 2}",)
    plan = compile_graph(path, settings, 1)
    assert "repeat for 1 epoch of prompts\n" in plan_text(plan) and plan.iterations == 0
    Path("plan.json").write_text(plan.json())
    run_graph("plan.json", run_dir=Path("whole"), inline=True)
    run_graph(path, settings, 1, run_dir=Path("cut"), inline=True, steps=2)
    run_graph(path, settings, 1, run_dir=Path("cut"), inline=True, resume=True)
    assert len(measured("whole")) == 3 and measured("cut") == measured("whole")


def test_epochs_count_what_a_refill_asks_for_and_rows_that_are_kept() -> None:
    asks = "schedule={epochs: 3}", "mixed.refill={expected: 0.5}"
    said = CliRunner().invoke(main, ["check", "--files", mixed("null", "refilled", ""), *asks])
    assert said.exit_code == 0 and ", 5 iterations" in said.output, said.output
    Path("sub/own.py").write_text(OWN)
    own = "prompts={op: 'sub/own.py:own', size: 7}"
    said = CliRunner().invoke(main, ["check", "--files", mixed("null"), asks[0], own])
    assert "only `prompts` itself knows how many rows it gives" in said.output
