"""Two graphs -> the edits that turn the one into the other.

Values are compared as written, ``${...}`` not filled in: edits are applied before that. The order in a
mapping is passed over, that of nodes too: all it decides is which of two updates of one model comes
first, and how steps are listed that do not wait for each other.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlgraph.errors import GraphError, fail, nearest
from rlgraph.frontend.tree_paths import SECTIONS
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import flow

NAMED = (("nodes",), ("models",), ("pools",), ("eval", "nodes"), ())  # their items are added, not set
WORDS = ("remove", "replace", "add", "set")

DiffPath = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """One place where two graphs differ, and the edit's word for it."""

    word: str
    path: DiffPath
    old: Tree | None
    new: Tree | None

    @property
    def name(self) -> str:
        """Return the place as edits spell it: ``rollout.n``, ``models.ref``."""
        is_in_node = self.path[0] == "nodes" and len(self.path) > 1
        # where a node has the name of a section, the word `nodes` tells the two apart
        if is_in_node and self.path[1] not in SECTIONS:
            return ".".join(self.path[1:])
        return ".".join(self.path)


def diff_trees(a: Tree, b: Tree) -> list[dict[str, Any]]:
    """Return the edits that turn graph ``a`` into ``b``, as ``compose.as_written`` returns both.

    They are what ``edits`` of a graph that extends ``a`` holds, as ``[{"set": {"rollout.n": 8}}]``: at most
    one of each kind, and none where the graphs are the same. No two of them touch one place.

    Raises:
        GraphError: they differ in a section that no graph has, which no edit reaches.
    """
    values_of: dict[str, dict[str, Any]] = {word: {} for word in WORDS}
    for change in _changes(a, b):
        value = change.new.plain() if change.new else None
        values_of[change.word][change.name] = value

    edits: list[dict[str, Any]] = []
    for word, values in values_of.items():
        if not values:
            continue
        # what is removed has no value
        content = [*values] if word == "remove" else values
        edits.append({word: content})
    return edits


def diff_text(a: Tree, b: Tree) -> str:
    """Return the edits, one a line, with the old value beside the new; nothing between equal graphs."""
    changes = sorted(_changes(a, b), key=lambda change: WORDS.index(change.word))
    lines = [f"{change.word:<8} {change.name}{_values(change)}\n" for change in changes]
    return "".join(lines)


def diff_yaml(edits: Sequence[dict[str, Any]]) -> str:
    """Return edits as YAML, to stand below ``extends``; a value a line.

    Example:
        >>> print(diff_yaml([{"remove": ["values"]}, {"set": {"rollout.n": 8}}]), end="")
        edits:
          - remove: [values]
          - set:
              rollout.n: 8
    """
    lines = ["edits:" if edits else "edits: []"]
    for edit in edits:
        ((word, content),) = edit.items()
        if isinstance(content, list):
            lines.append(f"  - {word}: {flow(content)}")
            continue
        lines.append(f"  - {word}:")
        for name, value in content.items():
            item = flow({name: value})[1:-1]  # without its braces
            lines.append(f"      {item}")
    return "\n".join(lines) + "\n"


def _values(change: Change) -> str:
    """Return the old and the new value of a change, as far as there are."""
    old = flow(change.old) if change.old else ""
    new = flow(change.new) if change.new else ""
    if change.word == "remove":
        return f"  (was {old})"
    if old:
        return f": {old} -> {new}"
    return f": {new}"


def _changes(a: Tree, b: Tree) -> Iterator[Change]:
    for name in dict.fromkeys((*a.items, *b.items)):
        old = a.get(name)
        new = b.get(name)
        if name not in SECTIONS and not _same(old, new):
            raise _no_section(name, old or new)
        yield from _between(old, new, (name,))


def _no_section(name: str, place: Tree | None) -> GraphError:
    law = f"the graphs differ in `{name}`, and a graph has no such section"
    mark = place.key if place else None
    return fail("unknown-section", law, mark, SECTIONS, nearest(name, SECTIONS))


def _between(old: Tree | None, new: Tree | None, path: DiffPath) -> Iterator[Change]:
    if _same(old, new):
        return
    if new is None:
        yield Change("remove", path, old, new)
        return
    is_named = path[:-1] in NAMED
    if old is None:
        word = "add" if is_named else "set"
        yield Change(word, path, old, new)
        return
    are_maps = old.is_map and new.is_map
    if not are_maps:
        yield Change("set", path, old, new)
        return

    changes: list[Change] = []
    has_dotted_name = False  # which no path of an edit can spell
    for name in dict.fromkeys((*old.items, *new.items)):
        changes_of_item = list(_between(old.get(name), new.get(name), (*path, name)))
        changes += changes_of_item
        if changes_of_item and "." in name:
            has_dotted_name = True
    is_shorter_as_one = is_named and len(changes) > _leaf_count(new)
    if has_dotted_name or is_shorter_as_one:
        yield Change("replace", path, old, new)
    else:
        yield from changes


def _same(a: Tree | None, b: Tree | None) -> bool:
    """Return whether two values are equal and of one type: 1, 1.0 and true are three values."""
    if a is None or b is None:
        return a is b
    return json.dumps(a.plain(), sort_keys=True) == json.dumps(b.plain(), sort_keys=True)


def _leaf_count(tree: Tree) -> int:
    if not tree.items:
        return 1
    return sum(_leaf_count(child) for child in tree.items.values())
