"""Composition: files, edits and overrides become one tree.

``extends`` names a parent (a file beside this one, or a shipped graph); ``edits`` are applied to it in order;
``key=value`` from the command line is a last ``set``; then ``${...}`` is filled in. Every value keeps the
mark of the place that it came from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlgraph.errors import Mark, Source, fail, nearest
from rlgraph.frontend.edits import EDITS, apply
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.frontend.tree_paths import put_set, resolve
from rlgraph.syntax import source
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.source import Tree


def compose(graph: str, overrides: Sequence[str] = ()) -> Tree:
    """Return the composed tree of a graph, given as a path or the name of a shipped one.

    ``overrides`` are ``key=value`` as typed on the command line.

    Raises:
        GraphError: a file, an edit, an override or an interpolation is wrong.
    """
    return interpolate(as_written(graph, overrides))


def as_written(graph: str, overrides: Sequence[str] = ()) -> Tree:
    """Return the tree of a graph with its ``${...}`` still in place; edits are applied to it.

    Raises:
        GraphError: a file, an edit or an override is wrong.
    """
    return overridden(_load(graph, None, ()), overrides)


def overridden(tree: Tree, overrides: Sequence[str]) -> Tree:
    """Return a tree with ``key=value`` of the command line set in it.

    Raises:
        GraphError: an override is wrong.
    """
    for override in overrides:
        name, value = setting(override)
        tree = put_set(tree, resolve(tree, name, value.key), value, value.key)
    return tree


def _load(graph: str, by: Tree | None, seen: tuple[Path, ...]) -> Tree:
    path, mark = _find(graph, by), by.mark if by else None
    if path.resolve() in seen:
        raise fail("extends-cycle", f"`extends` goes in a circle: {path} extends itself", mark)
    tree = source.read(path)
    parent, edits = tree.get("extends"), tree.get("edits")
    if parent and not isinstance(parent.value, str):
        law = "`extends` is the name of a shipped graph, or a file beside this one"
        raise fail("wrong-type", law, parent.mark, shipped_graphs())
    if parent is None:
        if edits is not None:
            raise fail("edits-alone", "`edits` change a parent; name one with `extends`", edits.key)
        return tree
    return _extend(tree, _load(parent.value, parent, (*seen, path.resolve())), edits)


def _find(graph: str, by: Tree | None) -> Path:
    folder = Path(by.mark.source.name).parent if by else Path()
    path = folder / graph
    if os.path.isfile(path):  # unlike Path.is_file, false for a name too long
        return path
    shipped = shipped_graphs()
    if graph in shipped:
        return shipped[graph]
    why = f"there is no such file in {folder.resolve()}, and no shipped graph of that name"
    if not by and os.path.isdir(path):
        why = "that is a folder"
    law, hint = f"no graph `{graph}`: {why}", nearest(Path(graph).stem, shipped)
    raise fail("no-graph", law, by.mark if by else None, shipped, hint)


def _extend(child: Tree, parent: Tree, edits: Tree | None) -> Tree:
    for name, item in child.items.items():
        if name not in ("graph", "about", "extends", "edits"):
            law = f"`{name}` can't stand beside `extends`: a graph that extends another changes it by `edits`"
            remedy = f"edits: [{{set: {{{name}...: ...}}}}]"
            raise fail("section-beside-extends", law, item.key, remedy=remedy)
    tree = parent
    for name in ("graph", "about"):
        if child.get(name):
            tree = tree.with_item(name, child.items[name])
    if edits and not isinstance(edits.value, list | None):
        raise fail("edits-no-list", "`edits` is a list of edits", edits.mark, EDITS)
    for edit in (edits.value if edits else None) or ():
        tree = apply(tree, edit)
    return tree


def setting(text: str) -> tuple[str, Tree]:
    """Return the name and the value of ``key=value`` as typed on the command line.

    Raises:
        GraphError: it is none, or its value is no YAML.
    """
    where = Source("command line", text)
    name, equals, value = text.partition("=")
    if not equals:
        raise fail("bad-override", "an override is key=value, as rollout.n=8", Mark(where, 1, 1))
    column = len(name) + 2
    if value.lstrip().startswith("#"):
        law = f"`{value.strip()}` is a comment in YAML, not a value"
        remedy = f"quote it: '{name}=\"{value.strip()}\"'"
        raise fail("bad-override", law, Mark(where, 1, column), remedy=remedy)
    parsed = source.parse(where, column - 1) if value.strip() else Tree("", Mark(where, 1, 1))
    return name.strip(), replace(parsed, key=Mark(where, 1, 1))
