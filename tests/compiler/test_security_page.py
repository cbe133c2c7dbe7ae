"""docs/security.md promises nothing without a test, and names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_test_that_the_page_names_is_there() -> None:
    assert len(NAMED) > 30
    for file, name in NAMED:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)


def test_every_promise_has_a_test() -> None:
    promises = [item for item in re.split(r"\n(?=- |## |\Z)", PAGE) if item.startswith("- ")]
    assert len(promises) > 20
    without = [item for item in promises if "::" not in item and not item.startswith("- **What stays open**")]
    assert without == []


def test_the_page_is_pointed_to() -> None:
    for file in ("SECURITY.md", "README.md"):
        assert "docs/security.md" in (ROOT / file).read_text(encoding="utf-8")
