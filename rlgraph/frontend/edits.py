"""Edits: the changes that a graph makes to the one that it extends.

Each is strict: one that names what is not there fails with the nearest name.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from rlgraph.errors import GraphError, fail, nearest
from rlgraph.frontend.edge_edits import insert, rename
from rlgraph.frontend.tree_paths import SECTIONS, put, put_set, resolve
from rlgraph.syntax.source import Tree
from rlgraph.syntax.validate import Binder


def apply(tree: Tree, edit: Tree) -> Tree:
    """Return a graph's tree after one edit, such as ``set: {rollout.n: 8}``.

    Raises:
        GraphError: no such edit, or it names what is not there.
    """
    if len(edit.items) != 1:
        law = "an edit is one word and what it is about, as `set: {rollout.n: 8}`"
        raise fail("bad-edit", law, edit.mark, EDITS)
    ((word, content),) = edit.items.items()
    if word not in EDITS:
        raise fail("unknown-edit", f"no edit is called `{word}`", content.key, EDITS, nearest(word, EDITS))
    binder = Binder()
    for name, child in _items(content, word):
        tree = binder.attempt(EDITS[word], tree, name, child) or tree
    if binder.problems:
        raise GraphError(binder.problems, tree)
    return tree


def _items(content: Tree, word: str) -> Iterator[tuple[str, Tree]]:
    """Yield the names in an edit, each with its value; in ``remove``, which has no values, with itself."""
    if word != "remove":
        if not content.is_map:
            raise fail("bad-edit", f"`{word}` takes a mapping of names to values", content.mark)
        yield from content.items.items()
        return
    names = content.value if isinstance(content.value, list) else [content]
    for name in names:
        if not isinstance(name.value, str):
            raise fail("bad-edit", "`remove` takes names, as `remove: [values, models.critic]`", name.mark)
        yield name.value, name


def _remove(tree: Tree, name: str, place: Tree) -> Tree:
    without = put(tree, resolve(tree, name, place.mark), None, place.mark, must_exist=True)
    return replace(without, removed={**tree.removed, name: place.mark})


def _replace(tree: Tree, name: str, child: Tree) -> Tree:
    return put(tree, resolve(tree, name, child.key), child, child.key, must_exist=True)


def _set(tree: Tree, name: str, child: Tree) -> Tree:
    return put_set(tree, resolve(tree, name, child.key), child, child.key)


def _add(tree: Tree, name: str, child: Tree) -> Tree:
    path = tuple(name.split("."))
    if path[0] not in SECTIONS:
        path = ("nodes", *path)
    if tree.find(path):
        law = f"`add` names what is there already: `{name}`"
        raise fail("add-existing", law, child.key, remedy="use `replace` or `set`")
    return put(tree, path, child, child.key)


EDITS: dict[str, Callable[[Tree, str, Tree], Tree]] = {
    "add": _add,
    "remove": _remove,
    "replace": _replace,
    "set": _set,
    "insert": insert,
    "rename": rename,
}
