"""Interpolation: replaces ``${...}`` by the value of the graph or of the environment for which it stands.

``${models.policy.path}`` alone keeps the type of what it names; inside a text it becomes text.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import partial

from rlgraph.errors import GraphError, Mark, Problem, nearest
from rlgraph.syntax import source
from rlgraph.syntax.source import Tree

INTERPOLATION = re.compile(r"\$\{([^}]*)\}")


def interpolate(root: Tree) -> Tree:
    """Return a tree with every ``${...}`` filled in.

    Raises:
        GraphError: a reference can't be resolved; the error lists every such reference.
    """
    tree, problems = filled(root)
    if problems:
        raise GraphError(problems)
    return tree


def filled(root: Tree) -> tuple[Tree, tuple[Problem, ...]]:
    """Return a tree with its ``${...}`` filled in as far as possible, and the problems with the rest."""
    problems: list[Problem] = []
    tree = root.mapped(partial(_filled, root, problems, ()))
    return tree, tuple(dict.fromkeys(problems))  # a reference repeats the problem of what it names


def _filled(root: Tree, problems: list[Problem], chain: tuple[str, ...], tree: Tree) -> Tree:
    if not isinstance(tree.value, str) or "${" not in tree.value:
        return tree
    names = INTERPOLATION.findall(tree.value)
    if len(names) < tree.value.count("${"):
        problems.append(Problem("open-interpolation", "`${` has no `}`", tree.mark))
        return tree
    values = [_lookup(name, tree.mark, root, problems, chain) for name in names]
    if len(names) == 1 and INTERPOLATION.fullmatch(tree.value):
        # a string keeps the mark of its origin: a path is relative to the file that it stands in
        mark = values[0].mark if isinstance(values[0].value, str) else tree.mark
        return replace(values[0], mark=mark, key=tree.key)
    if any(value.value == source.OPEN for value in values):
        return replace(tree, value=source.OPEN)
    texts = []
    for name, value in zip(names, values, strict=True):
        if isinstance(value.value, dict | list):
            law = f"`${{{name}}}` is a mapping or a list, which can't stand inside a text"
            problems.append(Problem("not-a-text", law, tree.mark))
        texts.append(value.value if isinstance(value.value, str) else json.dumps(value.plain()))
    return replace(tree, value=INTERPOLATION.sub(lambda _: texts.pop(0), tree.value))


def _lookup(name: str, mark: Mark, root: Tree, problems: list[Problem], chain: tuple[str, ...]) -> Tree:
    if name.startswith("env:"):
        if name[4:] not in os.environ:
            law = f"the environment has no `{name[4:]}`"
            problems.append(Problem("no-env", law, mark, remedy=f"export {name[4:]}=... before the command"))
        return Tree(source.scalar(os.environ.get(name[4:], "")), mark)
    if name in chain:
        problems.append(Problem("interpolation-cycle", f"`${{{name}}}` refers to itself", mark))
        return Tree(None, mark)
    tree = root
    for part in name.split("."):
        if part not in tree.items:
            law = f"`${{{name}}}` refers to what is not there: no `{part}`"
            problems.append(Problem("no-reference", law, mark, tuple(tree.items), nearest(part, tree.items)))
            return Tree(None, mark)
        tree = tree.items[part]
    return tree.mapped(partial(_filled, root, problems, (*chain, name)))
