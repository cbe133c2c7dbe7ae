"""A graph, a plan and a run of others: what their text and their code can do to who looks at them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlgraph.check import check_report
from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.errors import visible
from rlgraph.ops.registry import without_code
from rlgraph.printing.plan_text import plan_text
from rlgraph.request import PlanRequest
from rlgraph.view.terminal import terminal_text

ESCAPES = "\x1b]0;owned\x07 \x1b[2J\r \u202e"
OPS = """
from pathlib import Path

from rlgraph.ops import float32, op, samples, text

Path("ran").write_text("")


@op()
def mine(responses: text[samples]) -> float32[samples]:
    return responses


def policy(groups):
    return groups
"""
GRAPH = """
graph: own
extends: grpo
edits:
  - replace: {rewards: {op: "ops.py:mine"}}
  - add: {mixed: {op: filter.mixed, refill: true}}
  - set: {schedule.buffer: {order: "ops.py:policy"}}
  - set: {update_policy.loss: {kind: "ops.py:lossy"}}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("ops.py").write_text(OPS)
    Path("own.yaml").write_text(GRAPH)
    return tmp_path


def call(*args: str, expect: int = 0) -> Result:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == expect, result.output
    return result


@pytest.mark.parametrize("command", ["check", "plan", "view", "show --tree"])
def test_no_code_of_a_graph_runs_where_that_is_asked(own: Path, command: str) -> None:
    said = call(*command.split(), "own.yaml", "--no-code", expect=1).stderr
    for name in ("op `ops.py:mine`", "policy `ops.py:policy`", "loss `ops.py:lossy`"):
        assert f"{name} is in a Python file, which --no-code does not load" in said
    assert "own.yaml:5:" in said
    assert not Path("ran").exists()


def test_an_edit_that_splices_a_file_in_runs_none_of_it(own: Path) -> None:
    Path("own.yaml").write_text(
        'graph: own\nextends: grpo\nedits: [{insert: {more: {op: "ops.py:mine", on: rewards}}}]\n'
    )
    for args in (("diff", "grpo", "own.yaml"), ("show", "own.yaml"), ("check", "own.yaml")):
        assert "--no-code does not load" in call(*args, "--no-code", expect=1).stderr
    assert not Path("ran").exists()


def test_no_module_that_a_graph_names_is_loaded_where_that_is_asked(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path())
    Path("scores_of_a_module.py").write_text("open('ran', 'w')\n\ndef score(solution_str): ...\n")
    node = "{op: reward.verl, function: 'scores_of_a_module:score', in: {ground_truth: answer}}"
    Path("own.yaml").write_text(f"graph: own\nextends: grpo\nedits: [{{replace: {{rewards: {node}}}}}]\n")
    said = call("check", "own.yaml", "--no-code", expect=1).stderr
    assert "is in a Python module, which --no-code does not load" in said
    assert not Path("ran").exists()


def test_a_graph_without_files_is_checked_and_code_runs_again_behind(own: Path) -> None:
    assert "ok" in call("check", "grpo", "--no-code").output
    with without_code():
        assert not check_report(PlanRequest("own.yaml"))["ok"]
    call("check", "own.yaml", expect=1)  # its loss is not there
    assert Path("ran").exists()


def test_help_says_that_a_graphs_code_runs() -> None:
    for command in ("check", "plan", "view"):
        assert "Loading a file runs it: use this for graphs that you don't trust" in " ".join(
            call(command, "--help").output.split()
        )


def test_a_saved_plan_and_a_run_load_no_file(own: Path) -> None:
    Path("own.yaml").write_text(GRAPH.replace("ops.py:lossy", "ppo_clip"))
    call("plan", "own.yaml", "-o", "plan.json")
    Path("ops.py").unlink()
    for args in (("plan", "plan.json"), ("view", "plan.json"), ("plan", "plan.json", "--format", "dot")):
        call(*args, "--no-code")


def test_no_text_of_a_graph_reaches_a_terminal_as_control(own: Path) -> None:
    about = json.dumps(ESCAPES)
    Path("own.yaml").write_text(f"graph: own\nabout: {about}\nextends: grpo\nedits: []\n")
    Path("odd.yaml").write_text(f"extends: grpo\nedits: [{{set: {{{about}: 1}}}}]\n")
    outputs = [
        call(*args).output
        for args in (("plan", "own.yaml"), ("show", "own.yaml"), ("check", "own.yaml"), ("plan", "own.yaml"))
    ]
    outputs += [call("diff", "ppo", "own.yaml", expect=1).output]
    outputs += [call("check", "odd.yaml", expect=1).stderr]
    for output in outputs:
        assert output == visible(output)
    assert r"\x1b]0;owned\x07 \x1b[2J\r \u202e" in outputs[0]


def test_no_text_of_a_plan_reaches_a_terminal_as_control() -> None:
    plan = compile_graph("grpo", ["prompts.files=[a.jsonl]"], 1)
    steps = tuple(replace(step, node=f"{ESCAPES}{step.node}", because=ESCAPES) for step in plan.steps)
    named = replace(plan, about=ESCAPES, notes=(ESCAPES,), steps=steps)
    assert plan_text(named) == visible(plan_text(named))
    for shown in (terminal_text(named), call("check", "grpo").output):
        assert "\x1b]" not in shown and "\x1b[2J" not in shown and "\x07" not in shown and "\r" not in shown
