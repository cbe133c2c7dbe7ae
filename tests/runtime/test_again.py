"""A run that goes on, or is run again, by its folder alone."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ran import metrics, same_weights

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.errors import RunError
from rlgraph.frontend.compose import as_written
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.lock import check_free
from rlgraph.runtime.rundir.start import Start
from rlgraph.syntax.yaml_text import show_text

ONE = str(Path(__file__).parent / "ones.yaml")
OPEN = ("models.policy.path=m", "prompts.files=[a.jsonl]")
SMALL = ("schedule={iterations: 3, save_every: 1}", "rollout.n=2", "eval.nodes.prompts.batch=4")
MINE = """graph: mine
extends: PARENT
edits: [{set: {prompts.files: [rows.jsonl], prompts.batch: 4, update_policy.minibatches: 2}}]
"""


@pytest.fixture(autouse=True)
def _in_demo(in_demo: None) -> None: ...


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def train(run_dir: str, *settings: str, graph: str = ONE, **options: Any) -> None:
    run_graph(graph, (*SMALL, *settings), 1, run_dir=Path(run_dir), inline=True, **options)


@pytest.mark.slow
def test_the_command_that_a_stopped_run_prints_goes_on_with_it_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("whole")
    path = tmp_path / "my runs" / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr("rlgraph.cli.run.seconds_of", lambda text: 1e-6)  # a second may be enough for all of it
        stopped = call("run", ONE, *SMALL, "--inline", "--time-limit", "1s", "--run-dir", str(path))
    assert stopped.exit_code == 75
    (command,) = re.findall(r"continue with: (rlgraph .*)", stopped.stderr)
    os.chdir("/")
    resumed = call(*shlex.split(command)[1:])
    assert resumed.exit_code == 0, resumed.output
    assert "changed from here on" not in resumed.output
    os.chdir(tmp_path)
    assert metrics("whole") == metrics(str(path)) and same_weights("whole", str(path))


def test_a_run_is_run_again_by_its_folder_and_by_its_graph_wherever_its_files_were() -> None:
    rows = [json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(10, 14)]
    Path("graphs").mkdir()
    Path("graphs/rows.jsonl").write_text("\n".join(rows) + "\n")
    Path("graphs/mine.yaml").write_text(MINE.replace("PARENT", ONE))
    train("runs/one", graph="graphs/mine.yaml", steps=1)
    assert call("run", "runs/one").exit_code == 0
    assert metrics("runs/one-2") == metrics("runs/one")

    again = call("run", "runs/one/graph.yaml", "--inline", "--steps", "1", "--run-dir", "three")
    assert again.exit_code == 0, again.output
    assert metrics("three") == metrics("runs/one")

    # another graph in the file changes no run that goes on by its folder
    Path("graphs/mine.yaml").write_text("graph: mine")
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    assert "changed" not in call("resume", "../runs/one", "--steps", "2").output


def test_a_kept_graph_has_its_references_so_that_a_setting_reaches_what_follows_it() -> None:
    tree = as_written("dr_grpo", OPEN)
    Path("run").mkdir()
    Path("run/graph.yaml").write_text(show_text(tree))
    Path("run/start.json").write_text(Start("dr_grpo").text(tree))
    changed = compile_graph("run/graph.yaml", ["rollout.max_new_tokens=77"], 1)
    assert changed.functions["train"]["update_policy"].attributes["norm"] == 77
    assert compile_graph("run/graph.yaml", (), 1).digest == compile_graph("dr_grpo", OPEN, 1).digest


def test_a_setting_that_was_given_and_is_left_out_now_is_no_note() -> None:
    train("a", "rollout.temperature=0.9", steps=1)
    with pytest.raises(RunError) as raised:
        train("a", steps=2, resume=True)
    law, remedy = str(raised.value).splitlines()
    assert law == "a was started with rollout.temperature=0.9, which is left out now"
    flags = re.findall(r"--(?:keep|drop)-settings", remedy)
    is_changed = {}
    for flag in flags:
        done = call("run", ONE, *SMALL, "--inline", "--steps", "1", "--resume", "--run-dir", "a", flag)
        assert done.exit_code == 0, done.output
        is_changed[flag] = "rollout.temperature: 0.9 -> 1.0" in done.output
    assert is_changed == {"--keep-settings": False, "--drop-settings": True}
    # it is not left out, but another value is given
    train("a", "rollout.temperature=0.8", steps=1, resume=True)


def test_what_starts_or_goes_on_names_its_run() -> None:
    for words in (["resume", "nothing"], ["run", "--resume", "--run-dir", "nothing"]):
        assert "nothing" in call(*words).output
    assert "name a GRAPH" in call("run").output
    assert "leave out one of them" in call("run", "demo", "--inline", "--devices", "3").output
    folder = Path("a")
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    with pytest.raises(RunError, match="rlgraph resume a"):
        check_free(folder)
    assert "how it was started" in call("resume", "a").output
