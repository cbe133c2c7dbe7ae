"""A saved plan runs as its graph does, and not after the graph was edited."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from ran import metrics

from rlgraph.cli.main import main
from rlgraph.reports.plan_file import parse

ONES = Path(__file__).parent / "ones.yaml"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        f"graph: mine\nextends: {ONES}\nedits:\n  - set: {{schedule.iterations: 2}}\n"
    )


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.slow
def test_a_saved_plan_runs_as_its_graph_does_and_is_refused_after_an_edit() -> None:
    assert call("plan", "mine.yaml", "rollout.n=2", "--devices", "1", "-o", "plan.json").exit_code == 0
    saved = call("run", "plan.json", "--inline", "--run-dir", "a")
    assert saved.exit_code == 0, saved.output
    assert call("run", "mine.yaml", "rollout.n=2", "--inline", "--run-dir", "b").exit_code == 0
    assert [line["step"] for line in metrics("a")] == [0, 1, 2]
    assert metrics("a") == metrics("b")
    assert Path("a/graph.yaml").read_text() == Path("b/graph.yaml").read_text()
    assert parse(Path("a/plan.json").read_text()) == parse(Path("plan.json").read_text())

    # a run's own plan can be run as well, here on from its last checkpoint
    assert call("run", "a/plan.json", "--inline", "--resume", "--run-dir", "a", "--steps", "3").exit_code == 0
    assert metrics("a")[-1]["step"] == 3

    Path("mine.yaml").write_text(Path("mine.yaml").read_text().replace("{", "{rollout.temperature: 0.5, "))
    refused = call("run", "plan.json", "--inline", "--run-dir", "c")
    assert refused.exit_code == 1
    assert "plan.json is not run: the graph that it was made from, mine.yaml, has changed" in refused.stderr
    assert "set      rollout.temperature: 1.0 -> 0.5" in refused.stderr
    assert not Path("c").exists()


def test_a_plan_with_an_open_value_or_a_file_that_is_not_there_does_not_start() -> None:
    call("plan", "mine.yaml", "prompts.files=[gone.jsonl]", "--devices", "1", "-o", "plan.json")
    result = call("run", "plan.json", "--inline", "--run-dir", "a")
    assert result.exit_code == 1 and "gone.jsonl" in result.stderr  # as of the graph itself
    call("plan", "mine.yaml", "prompts.files=???", "--devices", "1", "-o", "plan.json")
    result = call("run", "plan.json", "--inline", "--run-dir", "a")
    assert result.exit_code == 1 and "`nodes.prompts.files` is still open" in result.stderr
