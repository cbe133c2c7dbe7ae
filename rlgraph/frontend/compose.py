"""Composition: files, edits and overrides become one tree.

``extends`` names a parent (a file beside this one, or a shipped graph); the edits of the fragments that
``use`` lists are applied to it in order, then ``edits``; ``key=value`` from the command line is a last
``set``; then ``${...}`` is filled in. Every value keeps the mark of the place that it came from.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlgraph.errors import COMMAND_LINE, GraphError, Mark, Problem, Source, fail, few_of, nearest
from rlgraph.frontend.edits import EDITS, apply
from rlgraph.frontend.kept_graph import with_folders
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.frontend.tree_paths import put_set, resolve
from rlgraph.syntax import source
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.settings import GraphFile
from rlgraph.syntax.source import Tree
from rlgraph.syntax.validate import Binder
from rlgraph.syntax.yaml_text import flow


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
    problems: list[Problem] = []
    try:
        tree = _load(graph, None, ())
    except GraphError as error:
        if error.valid_tree is None:
            raise
        tree = error.valid_tree
        problems += error.problems
    tree, problems_of_overrides = _with_overrides(tree, overrides)
    problems += problems_of_overrides
    if problems:
        raise GraphError(problems, tree)
    return tree


def overridden(tree: Tree, overrides: Sequence[str]) -> Tree:
    """Return a tree with ``key=value`` of the command line set in it.

    Raises:
        GraphError: an override is wrong.
    """
    tree, problems = _with_overrides(tree, overrides)
    if problems:
        raise GraphError(problems, tree)
    return tree


def _with_overrides(tree: Tree, overrides: Sequence[str]) -> tuple[Tree, list[Problem]]:
    """Return a tree with the overrides that are right set in it, and what is wrong with the others."""
    binder = Binder()
    for override in overrides:
        tree = binder.attempt(_overridden, tree, override) or tree
    return tree, binder.problems


def _overridden(tree: Tree, override: str) -> Tree:
    name, value = setting(override)
    if name == "use":
        return _edited(tree, _fragments(value))
    return put_set(tree, resolve(tree, name, value.key), value, value.key)


def _load(graph: str, reference: Tree | None, parents: tuple[Path, ...]) -> Tree:
    """Return the tree of a graph's file, with its edits made to the graph that it extends.

    ``reference`` is where another file names this one, and ``parents`` are the files that led to it.
    """
    path = _find(graph, reference)
    if path.resolve() in parents:
        mark = reference.mark if reference else None
        raise fail("extends-cycle", f"`extends` goes in a circle: {path} extends itself", mark)
    tree = with_folders(source.read(path), path)
    parent = tree.get("extends")
    edits = tree.get("edits")
    use = tree.get("use")
    if parent and not isinstance(parent.value, str):
        law = "`extends` is the name of a shipped graph, or a file beside this one"
        raise fail("wrong-type", law, parent.mark, shipped_graphs())
    edits_of_fragments = _fragments(use) if use else []
    if parent is None and edits is not None:
        remedy = "" if tree.get("graph") else f"to a graph, give it as a fragment: use: [{path.name}]"
        law = "`edits` change a parent; name one with `extends`"
        raise fail("edits-alone", law, edits.key, remedy=remedy)
    if parent is None:
        return _edited(tree.with_item("use", None), edits_of_fragments) if use else tree
    try:
        parent_tree = _load(parent.value, parent, (*parents, path.resolve()))
    except GraphError as error:
        raise GraphError(error.problems) from None  # what this file changes in it is unknown
    return _edited(_renamed_parent(tree, parent_tree), [*edits_of_fragments, *_list_of_edits(edits)])


def _find(graph: str, reference: Tree | None) -> Path:
    """Return the file of a graph; of a parent, ``reference`` is where it is named."""
    mark = reference.mark if reference else None
    folder = Path(mark.source.name).parent if mark else Path()
    path = folder / graph
    if os.path.isfile(path):  # unlike Path.is_file, false for a name too long
        return path
    shipped = shipped_graphs()
    if graph in shipped:
        return shipped[graph]
    reason = f"there is no such file in {folder.resolve()}, and no shipped graph of that name"
    if not reference and os.path.isdir(path):
        reason = "that is a folder"
    is_path = "/" in graph or "." in graph
    accepted = () if is_path else shipped
    stem = Path(graph).stem
    few = few_of(stem, accepted, "rlgraph graphs")
    raise fail("no-graph", f"no graph `{graph}`: {reason}", mark, accepted, nearest(stem, shipped), few)


def _fragments(use: Tree) -> list[Tree]:
    """Return the edits of the files that ``use`` lists, in order."""
    names = use.value if isinstance(use.value, list) else [use]
    edits = []
    for name in names:
        edits += _list_of_edits(_fragment(name))
    return edits


def _fragment(name: Tree) -> Tree:
    law = "`use` lists files of edits, fragments, beside this one"
    if not isinstance(name.value, str):
        raise fail("wrong-type", law, name.mark, remedy="as use: [cluster.yaml, lora.yaml]")
    folder = Path(name.mark.source.name).parent
    path = folder / name.value
    if not os.path.isfile(path):
        law += f"; there is no {name.value} in {folder.resolve()}"
        files = [str(file.relative_to(folder)) for file in path.parent.glob("*.yaml")]
        raise fail("no-file", law, name.mark, remedy=nearest(name.value, files))
    fragment = source.read(path)
    for section, item in fragment.items.items():
        if section in ("about", "edits"):
            continue
        law = f"`{section}` can't stand in a fragment, which has `edits` and may say what it is `about`"
        remedy = f"a whole graph is a parent: extends: {name.value}" if fragment.get("graph") else ""
        raise fail("no-fragment", law, item.key, ("about", "edits"), remedy)
    edits = fragment.get("edits")
    if edits is None:
        raise fail("no-fragment", f"{name.value} has no `edits`", fragment.mark)
    return edits


def _list_of_edits(edits: Tree | None) -> list[Tree]:
    if edits is None or edits.value is None:
        return []
    if not isinstance(edits.value, list):
        raise fail("edits-no-list", "`edits` is a list of edits", edits.mark, EDITS)
    return edits.value


def _renamed_parent(child: Tree, parent: Tree) -> Tree:
    """Return a parent under the name of a graph that extends it."""
    for name, item in child.items.items():
        if name in ("graph", "about", "extends", "use", "edits"):
            continue
        if name not in (*GraphFile.model_fields, *EDITS):
            law = f"a graph has no section `{name}`"
            near = nearest(name, GraphFile.model_fields)
            remedy = near or "leave it out; values that several places share are written out, or as ${...}"
            raise fail("unknown-attribute", law, item.key, GraphFile.model_fields, remedy)
        law = f"`{name}` can't stand beside `extends`: a graph that extends another changes it by `edits`"
        edit = {name: item.plain()} if name in EDITS else {"set": dict(_values(name, item))}
        raise fail("section-beside-extends", law, item.key, remedy=f"edits: [{flow(edit)}]")
    for name in ("graph", "about"):
        if child.get(name):
            parent = parent.with_item(name, child.items[name])
    return parent


def _edited(tree: Tree, edits: Sequence[Tree]) -> Tree:
    """Return a tree after edits, one after the other.

    Raises:
        GraphError: with the problems of all edits, and a valid tree if only values could not be set.
    """
    problems: list[Problem] = []
    can_go_on = True
    for edit in edits:
        try:
            tree = apply(tree, edit)
        except GraphError as error:
            tree = error.valid_tree or tree
            problems += error.problems
            if [*edit.items] != ["set"]:  # others make what is read further on
                can_go_on = False
    if problems:
        raise GraphError(problems, tree if can_go_on else None)
    return tree


def _values(name: str, tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the values in a section, by their paths."""
    if not tree.is_map:
        yield name, tree.plain()
        return
    for key, child in tree.items.items():
        yield from _values(f"{name}.{key}", child)


def setting(text: str) -> tuple[str, Tree]:
    """Return the name and the value of ``key=value`` as typed on the command line.

    Raises:
        GraphError: it has another form, or its value is not YAML.
    """
    command_line = Source(COMMAND_LINE, text)
    name, equals, value = text.partition("=")
    if not equals:
        raise fail("bad-override", "an override is key=value, as rollout.n=8", Mark(command_line, 1, 1))
    column = len(name) + 2
    if value.lstrip().startswith("#"):
        law = f"`{value.strip()}` is a comment in YAML, not a value"
        remedy = f"quote it: '{name}=\"{value.strip()}\"'"
        raise fail("bad-override", law, Mark(command_line, 1, column), remedy=remedy)
    start = Mark(command_line, 1, 1)
    parsed = Tree("", start)
    if value.strip():
        parsed = source.parse(command_line, column - 1)
    return name.strip(), replace(parsed, key=start)
