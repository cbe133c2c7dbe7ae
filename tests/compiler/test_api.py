"""The Python API says what the command line says."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import rlgraph
from rlgraph.cli.main import main
from rlgraph.errors import GraphError, RunError
from rlgraph.view.page import embedded

DOCS = Path(__file__).parents[2] / "docs"
FEWER = ["values", "update_critic", "shaped", "models.critic"]


def printed(*args: str) -> str:
    return CliRunner().invoke(main, args).stdout


def test_a_graph_prints_as_show_does() -> None:
    assert str(rlgraph.load("grpo", "rollout.n=16")) == printed("show", "grpo", "rollout.n=16")


def test_a_plan_prints_and_saves_as_plan_does(tmp_path: Path) -> None:
    made = rlgraph.load("grpo").edit("rollout.n=16").plan("h100-8")
    assert str(made) == printed("plan", "grpo", "rollout.n=16", "--cluster", "h100-8")
    made.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == printed(
        "plan", "grpo", "rollout.n=16", "--cluster", "h100-8", "--format", "json"
    )
    assert made.dot() == printed("plan", "grpo", "rollout.n=16", "--cluster", "h100-8", "--format", "dot")
    assert made.mermaid().startswith("flowchart") and json.loads(made.trace())["traceEvents"]


def test_set_is_the_same_as_a_setting() -> None:
    assert rlgraph.load("grpo").edit(set={"rollout.n": 16}) == rlgraph.load("grpo", "rollout.n=16")


def test_edits_make_the_same_graph_as_a_file_of_them(tmp_path: Path) -> None:
    edited = rlgraph.load("ppo", "seed=3").edit(
        remove=FEWER, replace={"advantages": {"op": "advantage.grpo"}}, set={"rollout.n": 8}
    )
    saved = edited.save(tmp_path / "mine.yaml")
    assert str(rlgraph.diff(edited, saved)) == "set      graph: ppo -> mine\n"
    assert saved.plan(devices=2).plan.steps == edited.plan(devices=2).plan.steps
    assert saved.plan("h100-8").plan.peak == edited.plan("h100-8").plan.peak
    again = saved.edit("seed=4").save(tmp_path / "again.yaml")
    assert again.tree().items["seed"].value == 4


def test_an_edited_graph_says_that_it_is_edited() -> None:
    edited = rlgraph.load("ppo").edit(remove=FEWER).edit(replace={"advantages": {"op": "advantage.grpo"}})
    about = "ppo with edits in Python (remove, replace)"
    assert str(edited.plan(devices=2)).startswith(f"plan of ppo: {about}\n")
    assert f'\nabout: "{about}"\n' in str(edited) and about in edited.plan(devices=2).html()
    assert "about" not in str(rlgraph.diff("ppo", edited)), "it is no edit"
    named = edited.edit(set={"about": "Mine"})
    assert str(named.plan(devices=2)).startswith("plan of ppo: Mine\n")
    assert "with a critic" in str(rlgraph.load("ppo", "rollout.n=16").plan(devices=2))


def test_a_change_leaves_the_graph_as_it_was() -> None:
    graph = rlgraph.load("grpo")
    graph.edit("rollout.n=16")
    assert not rlgraph.diff("grpo", graph)
    assert rlgraph.diff("ppo", "grpo").edits[0] == {
        "remove": ["models.critic", *FEWER[:1], "shaped", "update_critic"]
    }


def test_what_is_wrong_is_told_at_once() -> None:
    with pytest.raises(GraphError, match="did you mean `rollout`"):
        rlgraph.load("grpo").edit("rolout.n=16")
    with pytest.raises(GraphError, match="no edit is called `drop`"):
        rlgraph.load("grpo").edit(drop=["values"])
    with pytest.raises(GraphError, match="has no attribute `nn`"):
        rlgraph.load("grpo", "rollout.nn=16").check()
    with pytest.raises(RunError, match="set="):
        rlgraph.load("ppo").edit(remove=FEWER[:3], replace={"advantages": {"op": "advantage.grpo"}}).edit(
            "seed=1"
        )


def test_edits_are_saved_before_they_run() -> None:
    edited = rlgraph.load("grpo").edit(replace={"advantages": {"op": "advantage.rloo"}})
    with pytest.raises(RunError, match="save them first"):
        edited.check().run()


def test_check_gives_the_graph_back() -> None:
    graph = rlgraph.load("grpo")
    assert graph.check() is graph


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    for shown in (rlgraph.load("grpo").plan("h100-8"), rlgraph.diff("ppo", "grpo")):
        text = shown._repr_html_()
        assert text.startswith('<iframe sandbox="allow-scripts" ') and text.count("<") == 2
        page = html.unescape(text.partition('srcdoc="')[2].partition('"')[0])
        assert page.startswith("<!doctype html>") and embedded("grpo") in page


def test_diff_is_the_function_whatever_was_imported_before() -> None:
    script = "import rlgraph.compiler, rlgraph.reports.plan_file, rlgraph.frontend.graph_diff; "
    script += "print(len(rlgraph.diff('ppo', 'grpo').edits))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"


def test_the_page_of_docs_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "views.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)run = ", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)  # the page's own lines
    assert str(rlgraph.diff("mine.yaml", "ppo")) and isinstance(names["mine"], rlgraph.Algorithm)
    (commands,) = re.findall(r"```\n(rlgraph view.*?)```", text, re.DOTALL)
    lines = [line.partition("#")[0] for line in commands.splitlines()]
    absent = ["runs/demo", *([] if shutil.which("dot") else [".svg"])]
    for line in (line for line in lines if not any(name in line for name in absent)):
        assert CliRunner().invoke(main, shlex.split(line)[1:]).exit_code == 0, line
    assert (tmp_path / "grpo.html").is_file() and len(lines) == 10


def test_completion_lists_the_public_names_alone() -> None:
    assert dir(rlgraph) == sorted(rlgraph.__all__)


def test_a_number_is_no_cluster() -> None:
    with pytest.raises(
        RunError, match=r"plan\(8\) names no cluster\n  for so many devices: plan\(devices=8\)"
    ):
        rlgraph.load("grpo").plan(8)  # type: ignore[arg-type]
