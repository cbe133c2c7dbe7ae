"""What a graph takes from the environment reaches its ops, and no file, tracker, page or message of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from rlgraph.api import Run
from rlgraph.errors import RunError
from rlgraph.runtime.engines.sglang.options import wrong
from rlgraph.runtime.export import export
from rlgraph.runtime.replay import replay
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
CANARY = "sk-canary-0123456789"
GRAPH = f"""
graph: own
extends: {HERE / "ones.yaml"}
edits:
  - replace: {{rewards: {{op: "{HERE / "canary_ops.py"}:graded", key: "${{env:CANARY}}"}}}}
  - set: {{schedule: {{iterations: 2, record_every: 1, save_every: 1}}}}
"""
WANDB = """
import os

def init(**settings):
    with open(os.path.join(settings["dir"], "wandb.txt"), "w") as file:
        file.write(repr(settings))
    return Run()

class Table:
    def __init__(self, columns, data, allow_mixed_types): pass

class Histogram:
    def __init__(self, values): pass

class Run:
    def log(self, values, step): pass
    def finish(self, exit_code): pass
"""
pytestmark = pytest.mark.usefixtures("in_demo")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CANARY", CANARY)
    (tmp_path / "own.yaml").write_text(GRAPH)
    return "own.yaml"


def leaks(folder: Path) -> list[str]:
    """The files that hold the key, or where the demo's files are, which is of the environment too."""
    secrets = [CANARY.encode(), os.environ["RLGRAPH_TEST_FILES"].encode()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if any(secret in path.read_bytes() for secret in secrets)]


@pytest.mark.slow
def test_a_run_writes_references_alone(
    own: str, run_on_devices: Callable[..., str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = run_on_devices(own, "--devices", "2", "--run-dir", "run")
    Run(Path("run")).view("run/page.html")
    assert leaks(tmp_path / "run") == []
    assert CANARY not in said + "".join(capfd.readouterr())
    assert "${env:CANARY}" in Path("run/graph.yaml").read_text()
    logs = "".join(path.read_text() for path in Path("run/logs").glob("beside-*.log"))
    assert "asked with ${env:CANARY}" in logs
    run_on_devices(own, "--devices", "2", "--run-dir", "run", "--resume", "--steps", "3")
    assert replay(Path("run"), 1, "rewards").steps
    export(Path("run"), Path("exported"))
    assert leaks(tmp_path / "run") == leaks(tmp_path / "exported") == []


def test_a_tracker_gets_references(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("wandb")
    stub.__spec__ = ModuleSpec("wandb", None)
    exec(WANDB, vars(stub))
    monkeypatch.setitem(sys.modules, "wandb", stub)
    run_graph(own, (), 1, inline=True, steps=1, run_dir=Path("run"), track=["wandb"])
    assert "${env:CANARY}" in Path("run/wandb.txt").read_text()
    assert leaks(tmp_path / "run") == []


@pytest.mark.slow
def test_the_error_of_an_op_has_the_reference(
    own: str, run_on_devices: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(RunError) as caught:
        run_graph(own, ("rewards.fails=true",), 1, inline=True, run_dir=Path("inline"))
    assert "http://grader/?key=${env:CANARY} refused" in str(caught.value)
    said = run_on_devices(own, "rewards.fails=true", "--devices", "2", "--run-dir", "run", expect=1)
    assert "http://grader/?key=${env:CANARY} refused" in said and CANARY not in said
    assert leaks(tmp_path) == []


def test_a_file_that_is_not_there_is_named_by_its_reference(
    own: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(tmp_path / "nowhere"))
    with pytest.raises(Exception, match=r"\$\{env:RLGRAPH_TEST_FILES\}/model does not exist") as caught:
        run_graph(own, (), 1, inline=True)
    assert "nowhere" not in str(caught.value)


def test_settings_of_a_server_are_checked_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    child.write_text("#!/bin/sh\ntr '\\0' ' ' < /proc/$$/cmdline > line\ncat > given\necho {}\n")
    child.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(child))
    assert wrong({"ssl_keyfile_password": CANARY}) == {}
    assert "sglang.options" in Path("line").read_text() and CANARY not in Path("line").read_text()
    assert CANARY in Path("given").read_text()
