"""Files, edits and overrides -> one tree.

``extends`` names a parent (a file beside this one, or a shipped graph); ``edits`` are applied to it in order;
``key=value`` from the command line is a last ``set``; then ``${...}`` is filled in. Every value keeps the
mark of the place that it came from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlgraph import source
from rlgraph.errors import GraphError, Mark, Problem, Source, fail, nearest
from rlgraph.source import Tree

SECTIONS = ("graph", "about", "seed", "models", "nodes", "eval", "pools", "schedule")
INTERPOLATION = re.compile(r"\$\{([^}]*)\}")


def compose(graph: str, overrides: Sequence[str] = ()) -> Tree:
    """The composed tree of a graph.

    Args:
        graph: a path, or the name of a shipped graph.
        overrides: ``key=value`` as typed on the command line.

    Raises:
        GraphError: a file, an edit, an override or an interpolation is wrong.
    """
    tree = _load(graph, None, ())
    for override in overrides:
        tree = _override(tree, override)
    return _interpolate(tree)


def shipped_graphs() -> dict[str, Path]:
    """Name -> file of every shipped graph."""
    return {path.stem: path for path in sorted(graphs_folder().glob("*.yaml"))}


def graphs_folder() -> Path:
    """Where the shipped graphs lie: the package ``rlgraph.graphs``."""
    import rlgraph.graphs

    return Path(next(iter(rlgraph.graphs.__path__)))


def _load(graph: str, by: Tree | None, seen: tuple[Path, ...]) -> Tree:
    path = _find(graph, by)
    if path.resolve() in seen:
        raise fail(
            "extends-cycle", f"`extends` goes in a circle: {path} extends itself", by.mark if by else None
        )
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
    names = [*shipped]
    law = (
        f"no graph `{graph}`: there is no such file in {folder.resolve()}, and no shipped graph of that name"
    )
    if not by and os.path.isdir(path):
        law = f"no graph `{graph}`: that is a folder"
    raise fail("no-graph", law, by.mark if by else None, names, nearest(Path(graph).stem, names))


def _extend(child: Tree, parent: Tree, edits: Tree | None) -> Tree:
    for name, item in child.items.items():
        if name not in ("graph", "about", "extends", "edits"):
            law = f"`{name}` can't stand beside `extends`: a graph that extends another changes it by `edits`"
            raise fail(
                "section-beside-extends", law, item.key, remedy=f"edits: [{{set: {{{name}...: ...}}}}]"
            )
    tree = parent
    for name in ("graph", "about"):
        if child.get(name):
            tree = tree.with_item(name, child.items[name])
    for edit in _edits(edits):
        tree = _apply(tree, edit)
    return tree


def _edits(edits: Tree | None) -> list[Tree]:
    if edits is None or edits.value is None:
        return []
    if not isinstance(edits.value, list):
        raise fail("edits-no-list", "`edits` is a list of edits", edits.mark, EDITS)
    return edits.value


def _apply(tree: Tree, edit: Tree) -> Tree:
    """One edit, such as ``set: {rollout.n: 8}``."""
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
        tree = _put(tree, path, None, name.mark, must_exist=True)
    return tree


def _replace(tree: Tree, content: Tree) -> Tree:
    for name, child in _mapping(content, "replace").items():
        path = resolve(tree, name, child.key)
        tree = _put(tree, path, child, child.key, must_exist=True)
    return tree


def _set(tree: Tree, content: Tree) -> Tree:
    for name, child in _mapping(content, "set").items():
        tree = _put_set(tree, resolve(tree, name, child.key), child, child.key)
    return tree


def _put_set(tree: Tree, path: tuple[str, ...], child: Tree, mark: Mark | None) -> Tree:
    # an attribute that is not written has a default to change; a node or a model has none
    must_exist = len(path) == 2 and path[0] in ("nodes", "models")
    return _put(tree, path, child, mark, must_exist)


def _add(tree: Tree, content: Tree) -> Tree:
    for name, child in _mapping(content, "add").items():
        path = tuple(name.split(".")) if name.split(".")[0] in SECTIONS else ("nodes", *name.split("."))
        if (len(path) == 1 and tree.get(path[0])) or (len(path) > 1 and _has(tree, path)):
            law = f"`add` names what is there already: `{name}`"
            raise fail("add-existing", law, child.key, remedy="use `replace` or `set`")
        tree = _put(tree, path, child, child.key)
    return tree


EDITS: dict[str, Callable[[Tree, Tree], Tree]] = {
    "add": _add,
    "remove": _remove,
    "replace": _replace,
    "set": _set,
}


def _mapping(content: Tree, word: str) -> dict[str, Tree]:
    if not content.is_map:
        raise fail("bad-edit", f"`{word}` takes a mapping of names to values", content.mark)
    return content.items


def _has(tree: Tree, path: tuple[str, ...]) -> bool:
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
    inside = next((f"{s}.{parts[0]}" for s in ("models", "pools") if _has(tree, (s, parts[0]))), "")
    if parts[0] not in known:
        raise fail(
            "edit-missing",
            f"`{parts[0]}` is neither a node nor a section",
            mark,
            known,
            f"did you mean `{inside}`?" if inside else nearest(parts[0], known),
        )
    return ("nodes", *parts)


def _put(
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
    if here is None and (must_exist or (rest and not _may_begin(head))):
        law = f"there is no `{head}` in " + (f"`{'.'.join(above)}`" if above else "the graph")
        raise fail("edit-missing", law, mark, tree.items, nearest(head, tree.items))
    if not rest:
        return tree.with_item(head, child)
    here = here or Tree({}, mark or tree.mark, mark)
    if not here.is_map:
        law = f"there is no `{rest[0]}` in `{'.'.join((*above, head))}`, which is {here.plain()!r}"
        raise fail("edit-missing", law, mark)
    return tree.with_item(head, _put(here, rest, child, mark, must_exist, (*above, head)))


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


def _override(tree: Tree, text: str) -> Tree:
    where = Source("command line", text)
    name, equals, value = text.partition("=")
    if not equals:
        raise fail("bad-override", "an override is key=value, as rollout.n=8", Mark(where, 1, 1))
    column = len(name) + 2
    if value.lstrip().startswith("#"):
        law = f"`{value.strip()}` is a comment in YAML, not a value"
        raise fail(
            "bad-override", law, Mark(where, 1, column), remedy=f"quote it: '{name}=\"{value.strip()}\"'"
        )
    parsed = source.parse(where, column - 1) if value.strip() else Tree("", Mark(where, 1, 1))
    key = Mark(where, 1, 1)
    return _put_set(tree, resolve(tree, name.strip(), key), replace(parsed, key=key), key)


def _interpolate(root: Tree) -> Tree:
    problems: list[Problem] = []
    tree = _filled(root, root, problems, ())
    if problems:
        raise GraphError(dict.fromkeys(problems))  # a reference repeats the problem of what it names
    return tree


def _filled(tree: Tree, root: Tree, problems: list[Problem], chain: tuple[str, ...]) -> Tree:
    if isinstance(tree.value, dict):
        return replace(tree, value={n: _filled(c, root, problems, chain) for n, c in tree.value.items()})
    if isinstance(tree.value, list):
        return replace(tree, value=[_filled(c, root, problems, chain) for c in tree.value])
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
        child = tree.get(part)
        if child is None:
            law = f"`${{{name}}}` refers to what is not there: no `{part}`"
            problems.append(Problem("no-reference", law, mark, tuple(tree.items), nearest(part, tree.items)))
            return Tree(None, mark)
        tree = child
    return _filled(tree, root, problems, (*chain, name))
