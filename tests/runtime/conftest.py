"""Files that runtime tests share: the demo's model and data, made once."""

from __future__ import annotations

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
    from rlgraph.runtime.demo import make

    folder = tmp_path_factory.mktemp("demo")
    make(folder / "demo_files")
    return folder
