"""The examples in docstrings are right."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "rlgraph").rglob("*.py"))
    if path.name != "__main__.py"
]


OTHERS = ["rlgraph.nodes.support.ragged", "rlgraph.runtime.columns.layouts"]


@pytest.mark.parametrize("name", [*COMPILER, *OTHERS])
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
