"""Trees and values as YAML: a composed graph, or one line of an edit."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlgraph.syntax.source import OPEN, Tree, scalar

ESCAPES = {"\n": "\\n", "\t": "\\t", '"': '\\"', "\\": "\\\\"}


def show_text(tree: Tree, origin: bool = False) -> str:
    """Return a composed graph as YAML; with ``origin``, each value's place as a comment."""
    return "\n".join(line.rstrip() for line in _yaml(tree, 0, origin)) + "\n"


def _yaml(tree: Tree, depth: int, origin: bool) -> Iterator[str]:
    indent = "  " * depth
    for name, child in tree.items.items():
        key = f"{indent}{_word(name)}:"
        if child.is_map and child.items:
            yield key
            yield from _yaml(child, depth + 1, origin)
        elif origin:
            line = f"{key} {flow(child)}"
            yield f"{line:<60}  # {place(child)}"
        else:
            yield f"{key} {flow(child)}"


def place(tree: Tree) -> str:
    """Return where a value came from: ``file:line``, or the command line."""
    source = tree.mark.source.name
    if source == "command line":
        return source
    _, _, file = source.rpartition("/")
    return f"{file}:{tree.mark.line}"


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as ``key=value``, as the command line takes them."""
    return [f"{path}={flow(value)}" for path, value in settings.items()]


def flow(value: Any) -> str:
    """Return a tree or a plain value in YAML's flow style, on one line, reading back as the same value."""
    if isinstance(value, Tree):
        value = value.value
    if isinstance(value, Mapping):
        items = [f"{_word(str(name))}: {flow(child)}" for name, child in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(child) for child in value) + "]"
    if isinstance(value, str):
        return _word(value)
    return json.dumps(value).replace("Infinity", ".inf")


def _word(value: str) -> str:
    """Return a text as it is if YAML reads it back the same, otherwise in double quotes."""
    if value == OPEN:
        return value
    is_plain = re.fullmatch(r"[A-Za-z_./][\w./@-]*( [\w./@-]+)*", value)
    if is_plain and scalar(value) == value:  # not a word that YAML reads as a boolean, or as null
        return value
    escaped = ""
    for character in value:
        if character in ESCAPES:
            escaped += ESCAPES[character]
        elif character.isprintable():
            escaped += character
        else:
            escaped += f"\\U{ord(character):08x}"
    return f'"{escaped}"'
