"""`rlgraph diff` of two runs: settings, edits, plans and the last metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph

METRICS = {"step": 3, "eval/accuracy": 0.25, "reward/mean": 0.5, "time/step": 2.0}


def make_run(name: str, *overrides: str, **metrics: float) -> None:
    run = Path(name)
    run.mkdir()
    (run / "plan.json").write_text(compile_graph("demo", overrides, 1).json())
    start = {"overrides": overrides, "folder": "/", "folders": {}, "devices": None, "inline": True}
    (run / "start.json").write_text(json.dumps(start))
    (run / "metrics.jsonl").write_text(json.dumps({**METRICS, **metrics}) + "\n")


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("a", "rollout.n=2")
    make_run("b", "rollout.n=4", **{"eval/accuracy": 0.75})
    make_run("slow", "rollout.n=2", **{"time/step": 9.0})


def test_two_runs_differ_in_settings_edits_plan_and_metrics() -> None:
    done = CliRunner().invoke(main, ["diff", "a", "b"])
    assert done.exit_code == 1, done.output
    head, started, graph, plan, table = done.output.split("\n\n")
    assert head == "a -> b"
    assert started == "started with\n  - rollout.n=2\n  + rollout.n=4"
    assert graph.splitlines() == ["graph", "  set      rollout.n: 2 -> 4"]
    assert "n: 2 -> 4" in plan
    rows = [line.split() for line in table.splitlines()[2:]]
    assert rows == [
        ["step", "3", "3"],
        ["eval/accuracy", "0.25", "0.75", "+0.5"],
        ["reward/mean", "0.5", "0.5"],
        ["time/step", "2", "2"],
    ]


def test_runs_that_differ_in_speed_alone_are_the_same() -> None:
    done = CliRunner().invoke(main, ["diff", "a", "slow"])
    assert done.exit_code == 0, done.output
    assert "started with: the same" in done.output and "graph: the same" in done.output


def test_a_graph_is_compared_with_that_of_a_run() -> None:
    Path("a/graph.yaml").write_text("graph: demo\nextends: demo\nedits: [{set: {rollout.n: 2}}]\n")
    done = CliRunner().invoke(main, ["diff", "demo", "a"])
    assert done.exit_code == 1 and "rollout.n: 8 -> 2" in done.output, done.output
