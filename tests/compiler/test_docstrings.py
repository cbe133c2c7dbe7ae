"""Docstrings say in the imperative, or as a noun phrase, what a thing does or is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlgraph", "nodes", "runtime")
QUESTIONS = {"What", "Where", "How", "Whether", "Which", "When", "Who", "Why"}


def first_words(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place of each docstring in a file, and its first word."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring:
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", docstring.split()[0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_with_a_question(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if not path.is_symlink()]
    assert files
    places = [place for path in files for place, word in first_words(path) if word in QUESTIONS]
    assert not places, f"begin with a verb, or with a noun: {places}"
