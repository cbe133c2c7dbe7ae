"""Interpolation: replaces ``${...}`` by the value of the graph for which it stands.

``${models.policy.path}`` alone keeps the type of what it names; inside a text it becomes text. A number of
``${env:NAME}`` is taken at once; a text stays, and is filled in where it is used (``rlgraph.variables``).
"""

import json
import os
import re
from dataclasses import replace
from functools import partial

from rlgraph.errors import GraphError, Mark, Problem, fail, nearest
from rlgraph.syntax import source
from rlgraph.syntax.former_keys import present_path
from rlgraph.syntax.source import MAX_SIZE, Tree
from rlgraph.variables import referred

INTERPOLATION = re.compile(r"\$\{([^}]*)\}")
TEXT = 100  # characters of a text that count as much as a value


def interpolate(root: Tree) -> Tree:
    """Return a tree with every ``${...}`` filled in.

    Raises:
        GraphError: a reference can't be resolved, and the error lists every such reference; or they stand for
            more than ``MAX_SIZE`` values.
    """
    tree, problems = filled(root)
    if problems:
        raise GraphError(problems)
    return tree


def filled(root: Tree) -> tuple[Tree, tuple[Problem, ...]]:
    """Return a tree with its ``${...}`` filled in as far as possible, and the problems with the rest."""
    interpolation = Interpolation(root)
    tree = root.mapped(partial(interpolation.filled, ()))
    # a reference repeats the problem of what it names
    return tree, tuple(dict.fromkeys(interpolation.problems))


class Interpolation:
    """Fills in the values of one tree.

    Invariants:
        - a problem is noted, and filling goes on; only more than ``MAX_SIZE`` values end it;
        - ``size`` counts the values that have taken the place of references, of long texts several.
    """

    def __init__(self, root: Tree) -> None:
        self.root = root
        self.size = 0
        self.problems = list[Problem]()

    def filled(self, chain: tuple[str, ...], tree: Tree) -> Tree:
        """Return a scalar with its references filled in; ``chain`` are those that led to it."""
        if not isinstance(tree.value, str) or "${" not in tree.value:
            return tree
        names = INTERPOLATION.findall(tree.value)
        if len(names) < tree.value.count("${"):
            self.problems.append(Problem("open-interpolation", "`${` has no `}`", tree.mark))
            return tree
        values = [self._lookup(name, tree.mark, chain) for name in names]
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
                self.problems.append(Problem("not-a-text", law, tree.mark))
            plain = value.written().plain()
            texts.append(plain if isinstance(plain, str) else json.dumps(plain))
        self._count(sum(map(len, texts)) // TEXT, tree.mark)
        return replace(tree, value=INTERPOLATION.sub(lambda _: texts.pop(0), tree.value))

    def _lookup(self, name: str, mark: Mark, chain: tuple[str, ...]) -> Tree:
        if name.startswith("env:"):
            return self._variable(name, mark)
        if name in chain:
            self.problems.append(Problem("interpolation-cycle", f"`${{{name}}}` refers to itself", mark))
            return Tree(None, mark)
        tree = self.root
        for key in name.split("."):
            if key not in tree.items:
                law = f"`${{{name}}}` refers to what is not there: no `{key}`"
                path = present_path(name)
                hint = f"write `${{{path}}}`" if path else nearest(key, tree.items)
                self.problems.append(Problem("no-reference", law, mark, tuple(tree.items), hint))
                return Tree(None, mark)
            tree = tree.items[key]
        self._count(sum(1 for _ in tree.walk()), mark)
        return tree.mapped(partial(self.filled, (*chain, name)))

    def _variable(self, name: str, mark: Mark) -> Tree:
        """Return the reference to a variable, or the value beside it where that is a number, not a text."""
        variable = name.removeprefix("env:")
        if variable not in os.environ:
            law = f"the environment has no `{variable}`"
            remedy = f"export {variable}=... before the command"
            self.problems.append(Problem("no-env", law, mark, remedy=remedy))
        reference = f"${{{name}}}"
        value = source.scalar(os.environ.get(variable, "text"))
        if not isinstance(value, str):
            return Tree(value, mark, reference=reference)
        referred(reference)  # errors show that from here on
        return Tree(reference, mark)

    def _count(self, more: int, mark: Mark) -> None:
        self.size += more
        if self.size > MAX_SIZE:
            law = f"the references up to here stand for more than {MAX_SIZE} values"
            raise fail("too-large", law, mark, remedy="refer to smaller parts, or write the values out")
