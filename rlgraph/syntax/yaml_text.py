"""Trees and values as YAML: a composed graph, or one line of an edit."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlgraph.syntax.source import OPEN, Tree, scalar


def show_text(tree: Tree, origin: bool = False) -> str:
    """Return a composed graph as YAML; with ``origin``, each value's place as a comment."""
    return "\n".join(line.rstrip() for line in _yaml(tree, 0, origin)) + "\n"


def _yaml(tree: Tree, depth: int, origin: bool) -> Iterator[str]:
    pad = "  " * depth
    for name, child in tree.items.items():
        name = _word(name)
        if child.is_map and child.items:
            yield f"{pad}{name}:"
            yield from _yaml(child, depth + 1, origin)
        else:
            line = f"{pad}{name}: {flow(child)}"
            yield f"{line:<60}  # {place(child)}" if origin else line


def place(tree: Tree) -> str:
    """Return where a value came from: ``file:line``, or the command line."""
    source = tree.mark.source.name
    return source if source == "command line" else f"{source.rpartition('/')[2]}:{tree.mark.line}"


def flow(value: Any) -> str:
    """Return a tree or a plain value in YAML's flow style, on one line, reading back as the same value."""
    value = value.value if isinstance(value, Tree) else value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_word(str(name))}: {flow(child)}" for name, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(child) for child in value) + "]"
    if isinstance(value, str):
        return _word(value)
    return "null" if value is None else json.dumps(value).replace("Infinity", ".inf")


def _word(value: str) -> str:
    """Return a text as it is where YAML reads it back so, else in double quotes."""
    plain = re.fullmatch(r"[A-Za-z_./][\w./@-]*( [\w./@-]+)*", value)
    if value == OPEN or (plain and scalar(value) == value):
        return value
    short = {"\n": "\\n", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
    escaped = (short.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in value)
    return '"' + "".join(escaped) + '"'
