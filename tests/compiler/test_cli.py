"""The command line: exit codes, what goes to which stream, and the JSON of a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.nodes import OPS
from rlgraph.printing.plan_text import plan_text

STEP_KEYS = {"id", "phase", "kind", "op", "node", "pool", "devices", "layout", "reads", "writes", "frees"}
STEP_KEYS |= {"models", "inserted", "because", "after", "filters", "joins", "updates", "seconds", "bytes"}
STEP_KEYS |= {"lead", "source", "path", "engine", "parts", "when", "region", "leaves", "beside"}


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize("name", shipped_graphs())
def test_check_passes_shipped_graphs(name: str) -> None:
    result = call("check", name)
    assert result.exit_code == 0 and not result.stderr
    assert f"{name}: ok, " in result.stdout


def test_check_lists_what_is_open() -> None:
    assert (
        "still open: nodes.prompts.files (give it as nodes.prompts.files=...)" in call("check", "grpo").stdout
    )
    assert "still open" not in call("check", "grpo", "prompts.files=[a.jsonl]").stdout


@pytest.mark.parametrize("command", ["check", "plan", "show"])
@pytest.mark.parametrize("args", [("nowhere",), ("demo", "rolout.n=1"), ("demo", "rollout.n")])
def test_what_is_wrong_goes_to_stderr_with_exit_code_1(command: str, args: tuple[str, ...]) -> None:
    result = call(command, *args)
    assert result.exit_code == 1
    assert not result.stdout and result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("check",),
        ("check", "demo", "--devices", "0"),
        ("check", "demo", "--devices", "two"),
        ("plan", "demo", "--format", "xml"),
        ("nowhere",),
        ("run", "demo", "--steps", "-1"),
        ("report",),
    ],
)
def test_usage_errors_exit_with_2(args: tuple[str, ...]) -> None:
    result = call(*args)
    assert result.exit_code == 2 and "Usage:" in result.stderr


def test_plan_prints_the_plan() -> None:
    result = call("plan", "demo", "--devices", "2")
    assert result.exit_code == 0
    assert result.stdout == plan_text(compile_graph("demo", devices=2))


@pytest.mark.parametrize("name", shipped_graphs())
def test_plan_as_json(name: str) -> None:
    result = call("plan", name, "--devices", "2", "--format", "json")
    plan = json.loads(result.stdout)
    assert plan["version"] == 1 and plan["graph"] == name
    for number, step in enumerate(plan["steps"], 1):
        assert step["id"] == number
        assert set(step) == STEP_KEYS
        assert step["inserted"] == bool(step["because"]) == (step["kind"] != "run")


def test_plan_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    result = call("plan", "demo", "--devices", "1", "-o", str(path))
    assert result.exit_code == 0 and not result.stdout
    assert path.read_text(encoding="utf-8") == plan_text(compile_graph("demo", devices=1))


def test_plan_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = call("plan", "demo", "-o", str(tmp_path / "nowhere" / "plan.txt"))
    assert result.exit_code == 1 and "No such file" in result.stderr


def test_a_wrong_graph_writes_no_file(tmp_path: Path) -> None:
    assert call("plan", "nowhere", "-o", str(tmp_path / "plan.txt")).exit_code == 1
    assert not [*tmp_path.iterdir()]


def test_show_prints_yaml_with_origins() -> None:
    assert "rollout:" in call("show", "demo").stdout
    assert "# grpo.yaml:" in call("show", "demo", "--origin").stdout
    assert "# command line" in call("show", "demo", "rollout.n=4", "--origin").stdout


def test_graphs_lists_every_shipped_graph() -> None:
    lines = call("graphs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*shipped_graphs()]
    assert all(len(line.split()) > 1 for line in lines)


@pytest.mark.parametrize("name", OPS)
def test_nodes_describes_an_op(name: str) -> None:
    result = call("nodes", name)
    assert result.exit_code == 0 and result.stdout.startswith(f"{name}\n")


def test_an_unknown_op_has_a_nearest_name() -> None:
    result = call("nodes", "rollut")
    assert result.exit_code == 1 and "did you mean `rollout`?" in result.stderr


def test_report_of_no_run(tmp_path: Path) -> None:
    result = call("report", str(tmp_path))
    assert result.exit_code == 1 and "holds no run" in result.stderr


def test_report_puts_the_slowest_step_first(tmp_path: Path) -> None:
    lines: list[dict[str, float]] = [{"step": 0, "eval/accuracy": 0.25}]
    lines += [{"step": n, "time/step": 1.0, "time/rollout": 0.75, "time/rewards": 0.125} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = call("report", str(tmp_path))
    assert result.exit_code == 0
    assert "2 iterations" in result.stdout and "0.250 after 0" in result.stdout
    assert result.stdout.index("rollout") < result.stdout.index("rewards")
    assert "75.0 %" in result.stdout


def test_the_module_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "rlgraph"]
    done = subprocess.run([*command, "check", "demo"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([*command, "check", "nowhere.yaml"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    done = subprocess.run([*command, "chekc"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("Usage: rlgraph")


def test_no_text_of_a_graph_steers_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text('graph: odd\nextends: demo\nabout: "\\e[2J\\e]0;mine\\a\\r"\n')
    said = call("plan", str(tmp_path / "odd.yaml")).stdout
    assert said.startswith(r"plan of odd: \x1b[2J\x1b]0;mine\x07\r" + "\n") and "\x1b" not in said
    refused = call("check", "no\x1b[2Jsuch").stderr
    assert r"no\x1b[2Jsuch" in refused and "\x1b" not in refused
