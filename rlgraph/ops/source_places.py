"""Finds the place of a function, and of an argument of its ``@op``, in the file that it is written in."""

import ast
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlgraph.errors import Mark, Source


def place_in_file(path: str, line: int, column: int) -> Mark | None:
    """Return a place in a file, whose name is relative where it is below this folder; None without a file."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    is_below = Path(path).is_relative_to(Path.cwd())
    name = os.path.relpath(path) if is_below else path
    return Mark(Source(name, text), line, column)


def place_of_function(function: Any, argument: str = "") -> tuple[str, int, int] | None:
    """Return the file, line and column of a function or of an argument of its ``@op``; lines count from 1.

    None where no file has the function.
    """
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None:
        return None
    path = code.co_filename
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for definition in _definitions(tree):
        decorators = definition.decorator_list
        first_line = decorators[0].lineno if decorators else definition.lineno
        if code.co_firstlineno not in (first_line, definition.lineno):
            continue
        for keyword in _keywords(definition):
            if keyword.arg == argument:
                return path, keyword.lineno, keyword.col_offset + 1
        return path, definition.lineno, definition.col_offset + 1
    return path, code.co_firstlineno, 1


def _definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _keywords(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.keyword]:
    for decorator in definition.decorator_list:
        if isinstance(decorator, ast.Call):
            yield from decorator.keywords
