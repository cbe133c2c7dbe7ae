"""Edits: what a graph that extends another changes in it.

Each is strict: one that names what is not there fails with the nearest name.
"""

from __future__ import annotations

from collections.abc import Callable

from rlgraph.errors import Mark, fail, nearest
from rlgraph.source import Tree

SECTIONS = ("graph", "about", "seed", "models", "nodes", "eval", "pools", "schedule")


def apply(tree: Tree, edit: Tree) -> Tree:
    """A graph's tree after one edit, such as ``set: {rollout.n: 8}``.

    Raises:
        GraphError: no such edit, or it names what is not there.
    """
    if len(edit.items) != 1:
        raise fail(
            "bad-edit", "an edit is one word and what it is about, as `set: {rollout.n: 8}`", edit.mark, EDITS
        )
    ((word, content),) = edit.items.items()
    if word not in EDITS:
        raise fail("unknown-edit", f"no edit is called `{word}`", content.key, EDITS, nearest(word, EDITS))
    return EDITS[word](tree, content)


def _remove(tree: Tree, content: Tree) -> Tree:
    names = content.value if isinstance(content.value, list) else [content]
    for name in names:
        if not isinstance(name.value, str):
            raise fail("bad-edit", "`remove` takes names, as `remove: [values, models.critic]`", name.mark)
        path = resolve(tree, name.value, name.mark)
        tree = put(tree, path, None, name.mark, must_exist=True)
    return tree


def _replace(tree: Tree, content: Tree) -> Tree:
    for name, child in _mapping(content, "replace").items():
        path = resolve(tree, name, child.key)
        tree = put(tree, path, child, child.key, must_exist=True)
    return tree


def _set(tree: Tree, content: Tree) -> Tree:
    for name, child in _mapping(content, "set").items():
        tree = put_set(tree, resolve(tree, name, child.key), child, child.key)
    return tree


def put_set(tree: Tree, path: tuple[str, ...], child: Tree, mark: Mark | None) -> Tree:
    # an attribute that is not written has a default to change; a node or a model has none
    must_exist = len(path) == 2 and path[0] in ("nodes", "models")
    return put(tree, path, child, mark, must_exist)


def _add(tree: Tree, content: Tree) -> Tree:
    for name, child in _mapping(content, "add").items():
        path = tuple(name.split(".")) if name.split(".")[0] in SECTIONS else ("nodes", *name.split("."))
        if (len(path) == 1 and tree.get(path[0])) or (len(path) > 1 and has(tree, path)):
            law = f"`add` names what is there already: `{name}`"
            raise fail("add-existing", law, child.key, remedy="use `replace` or `set`")
        tree = put(tree, path, child, child.key)
    return tree


def _insert(tree: Tree, content: Tree) -> Tree:
    from rlgraph.rewire import insert  # reads the declarations of ops, which other edits do without

    for name, child in _mapping(content, "insert").items():
        tree = insert(tree, name, child)
    return tree


def _rename(tree: Tree, content: Tree) -> Tree:
    from rlgraph.rewire import rename

    for name, child in _mapping(content, "rename").items():
        tree = rename(tree, name, child)
    return tree


EDITS: dict[str, Callable[[Tree, Tree], Tree]] = {
    "add": _add,
    "remove": _remove,
    "replace": _replace,
    "set": _set,
    "insert": _insert,
    "rename": _rename,
}


def _mapping(content: Tree, word: str) -> dict[str, Tree]:
    if not content.is_map:
        raise fail("bad-edit", f"`{word}` takes a mapping of names to values", content.mark)
    return content.items


def has(tree: Tree, path: tuple[str, ...]) -> bool:
    for part in path:
        child = tree.get(part)
        if child is None:
            return False
        tree = child
    return True


def resolve(tree: Tree, name: str, mark: Mark | None) -> tuple[str, ...]:
    """``rollout.n`` -> ``(nodes, rollout, n)``; ``models.ref`` as it is.

    Raises:
        GraphError: the first word is neither a section nor a node.
    """
    parts = tuple(name.split("."))
    if parts[0] in SECTIONS:
        return parts
    nodes = tree.get("nodes")
    known = [*(nodes.items if nodes else ()), *SECTIONS]
    inside = next((f"{s}.{parts[0]}" for s in ("models", "pools") if has(tree, (s, parts[0]))), "")
    if parts[0] not in known:
        raise fail(
            "edit-missing",
            f"`{parts[0]}` is neither a node nor a section",
            mark,
            known,
            f"did you mean `{inside}`?" if inside else nearest(parts[0], known),
        )
    return ("nodes", *parts)


def put(
    tree: Tree,
    path: tuple[str, ...],
    child: Tree | None,
    mark: Mark | None,
    must_exist: bool = False,
    above: tuple[str, ...] = (),
) -> Tree:
    """The tree with ``child`` at ``path``; None takes it out. Mappings on the way must be there."""
    head, rest = path[0], path[1:]
    here = tree.get(head)
    begins = above == ("pools",) or _may_begin(head)  # a pool by a wrong name has nothing that runs on it
    if here is None and (must_exist or (rest and not begins)):
        law = f"there is no `{head}` in " + (f"`{'.'.join(above)}`" if above else "the graph")
        raise fail("edit-missing", law, mark, tree.items, nearest(head, tree.items))
    if not rest:
        return tree.with_item(head, child)
    here = here or Tree({}, mark or tree.mark, mark)
    if not here.is_map:
        law = f"there is no `{rest[0]}` in `{'.'.join((*above, head))}`, which is {here.plain()!r}"
        raise fail("edit-missing", law, mark)
    return tree.with_item(head, put(here, rest, child, mark, must_exist, (*above, head)))


# mappings that a graph may leave out, and that an edit may begin
def _may_begin(name: str) -> bool:
    return name in (
        "schedule",
        "pools",
        "eval",
        "optimizer",
        "serve",
        "train",
        "loss",
        "in",
        "out",
        "nodes",
        "report",
    )
