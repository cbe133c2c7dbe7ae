"""The graph that a run keeps, in ``graph.yaml``, and where relative paths in it start.

A path in a graph is relative to the file in which it is written, and one on the command line to the working
folder. The kept graph unites what several files and the command line wrote, so ``start.json`` beside it says
for each value which folder that was. The kept graph means the same, then, wherever it is read from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlgraph.errors import Mark
from rlgraph.syntax.shipped_files import graphs_folder
from rlgraph.syntax.source import Tree

GRAPH = "graph.yaml"
START = "start.json"  # how a run was started


def folders_of(tree: Tree) -> dict[str, list[list[str | int]]]:
    """Return folder -> the paths of the values that were written there, of all but the working folder.

    Relative folders start at the working folder. Only texts are listed, since no other value is a path.
    """
    folders: dict[str, list[list[str | int]]] = {}
    for path, child in tree.walk():
        if not isinstance(child.value, str):
            continue
        folder = child.mark.source.base
        if folder not in (Path(), graphs_folder()):
            folders.setdefault(str(folder), []).append([*path])
    return folders


def with_folders(tree: Tree, file: Path) -> Tree:
    """Return the tree of a graph's file; if a run has kept it, its relative paths start where they did."""
    start = file.with_name(START)
    if file.name != GRAPH or not start.is_file():
        return tree
    try:
        record = json.loads(start.read_text(encoding="utf-8"))
        started_in = record["folder"]
        folders = {}
        for folder, paths in record["folders"].items():
            for path in paths:
                folders[tuple(path)] = folder
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return tree  # some other file of that name
    return _with_folders(tree, (), started_in, folders)


def _with_folders(
    tree: Tree, path: tuple[str | int, ...], started_in: str, folders: Mapping[tuple[Any, ...], str]
) -> Tree:
    """Return a tree in which the source of each text says at which folder its relative paths start."""
    value = tree.value
    if isinstance(value, dict):
        children = {}
        for name, child in value.items():
            children[name] = _with_folders(child, (*path, name), started_in, folders)
        return replace(tree, value=children)
    if isinstance(value, list):
        items = []
        for number, item in enumerate(value):
            items.append(_with_folders(item, (*path, number), started_in, folders))
        return replace(tree, value=items)
    if not isinstance(value, str):
        return tree
    folder = _seen_from_here(started_in, folders.get(path, "."))
    source = replace(tree.mark.source, folder=folder)
    return replace(tree, mark=Mark(source, tree.mark.line, tree.mark.column))


def _seen_from_here(started_in: str, folder: str) -> str:
    """Return a folder, which is relative to where a run was started, as a path from the working folder."""
    if os.path.isabs(folder) or os.path.realpath(started_in) == os.path.realpath("."):
        return folder
    return os.path.relpath(os.path.join(started_in, folder))
