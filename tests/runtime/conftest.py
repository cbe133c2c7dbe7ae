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


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``demo_files/model`` and the demo's data."""
    from rlgraph.runtime.demo import make

    folder = tmp_path_factory.mktemp("demo")
    make(folder / "demo_files")
    return folder
