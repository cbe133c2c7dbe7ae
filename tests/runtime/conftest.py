"""Files that runtime tests share: the demo's model and data, made once; a process group."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tool_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``demo_tool_files``: a model with a chat template, and the data of calculator_tool."""
    from rlgraph.runtime.demo_tools import make

    folder = tmp_path_factory.mktemp("tools")
    make(folder / "demo_tool_files")
    return folder


@pytest.fixture
def in_demo(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to run in; the graphs of these tests find the demo's files."""
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``demo_files/model`` and the demo's data."""
    from demo_files import make_demo_files

    folder = tmp_path_factory.mktemp("demo")
    make_demo_files(folder / "demo_files")
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    from ranks import process_group

    with process_group(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.nightly)])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Workers of a run are processes of this test's or, at night, Ray's."""
    from processes import ProcessCluster

    if request.param == "processes":
        monkeypatch.setattr("rlgraph.runtime.run.RayCluster", ProcessCluster)
    return str(request.param)


@pytest.fixture
def run_on_devices(workers: str) -> Callable[..., str]:
    """``rlgraph run``, in a process of its own with Ray; returns what it prints."""
    from click.testing import CliRunner
    from ran import rlgraph

    from rlgraph.cli.main import main

    def run(*args: str, expect: int = 0, **_: str) -> str:
        # no environment: what forks the processes outlives the run, and would hold a token
        before = {*multiprocessing.active_children()}
        done = CliRunner().invoke(main, ["run", *args])
        assert {*multiprocessing.active_children()} <= before, "a process is left"
        assert done.exit_code == expect, done.output
        return done.output

    return run if workers == "processes" else partial(rlgraph, "run")
