"""`rlgraph check --format json`: one object on stdout, whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlgraph.check import check_report
from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, Problem
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.request import PlanRequest

BAD = Path(__file__).parent / "bad"
KEYS = {"kind", "grade", "law", "file", "override", "line", "column", "accepted", "remedy", "drawing"}


def checked(*args: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the object that stdout is, with nothing on stderr."""
    result = CliRunner().invoke(main, ["check", *args, "--devices", "1", "--format", "json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not result.stderr
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("name", shipped_graphs())
def test_shipped_graphs_are_ok(name: str) -> None:
    plan = compile_graph(name, devices=1)
    known = {"open": [*plan.open_values], "steps": len(plan.steps), "pools": dict(plan.pools)}
    report = {"ok": True, "problems": [], "warnings": [], **known}
    assert checked(name) == (0, report)


def test_open_values_are_listed() -> None:
    assert checked("ppo")[1]["open"] == ["nodes.prompts.files"]
    assert checked("ppo", "prompts.files=[a.jsonl]")[1]["open"] == []


@pytest.mark.parametrize("name", ["several_errors", "several_edits", "not_yaml"])
def test_every_problem_of_a_broken_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of each problem is in test_errors.py, of every broken graph."""
    monkeypatch.chdir(BAD)
    with pytest.raises(GraphError) as caught:
        compile_graph(f"{name}.yaml", devices=1)
    code, report = checked(f"{name}.yaml")
    assert (code, report["ok"], report["open"], report["steps"]) == (1, False, [], None)
    assert [problem["law"] for problem in report["problems"]] == [p.law for p in caught.value.problems]
    for problem in report["problems"]:
        assert set(problem) == KEYS
        assert problem["override"] is None
        assert (problem["file"] is None) == (problem["line"] is None) == (problem["column"] is None)


def test_a_problem_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    problems = checked("misspelt_attribute.yaml")[1]["problems"]
    (problem,) = [problem for problem in problems if problem["kind"] == "unknown-attribute"]
    line = (BAD / problem["file"]).read_text().splitlines()[problem["line"] - 1]
    assert problem["remedy"].startswith("did you mean")
    name = problem["remedy"].split("`")[1]
    assert name in problem["accepted"]
    assert problem["law"].split("`")[3] == line[problem["column"] - 1 :].split(":")[0]


def test_a_problem_on_the_command_line() -> None:
    code, report = checked("demo", "rollout.n=4", "rolout.n=8")
    (problem,) = report["problems"]
    assert code == 1
    assert (problem["file"], problem["override"]) == (None, "rolout.n=8")
    assert (problem["line"], problem["column"]) == (1, 1)
    assert problem["remedy"] == "did you mean `rollout`?"


def test_the_value_of_an_override() -> None:
    (problem,) = checked("demo", "rollout.n=none")[1]["problems"]
    assert problem["override"][problem["column"] - 1 :] == "none"


def test_a_graph_that_is_not_there() -> None:
    (problem,) = checked("demmo")[1]["problems"]
    assert (problem["file"], problem["override"], problem["line"], problem["column"]) == (None,) * 4
    assert "demo" in problem["accepted"]


def test_text_that_is_no_ascii(tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text('graph: "数 学"\nnodes: {}\nschedule: {iterations: 1}\n', encoding="utf-8")
    (problem,) = checked(str(path))[1]["problems"]
    assert (problem["kind"], problem["file"]) == ("bad-name", str(path))


def test_a_usage_error_is_none_of_the_graph() -> None:
    result = CliRunner().invoke(main, ["check", "demo", "--format", "xml"])
    assert (result.exit_code, result.stdout) == (2, "")


def test_every_field_of_a_problem_is_told() -> None:
    of_text = {"mark", "nearest_names"}  # data have all that is accepted, and the place in parts
    assert {*Problem.__dataclass_fields__} - of_text | {"file", "override", "line", "column"} == KEYS


def test_the_report_holds_no_more_than_json_has() -> None:
    report = check_report(PlanRequest("demo", ["rolout.n=1"], 1))
    assert json.loads(json.dumps(report)) == report
