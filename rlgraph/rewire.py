"""Edits of edges: ``insert`` a node on a column, ``rename`` what others refer to.

Edges follow from names, so both must know which parameters read a column without saying so. They ask the ops'
declarations, and write what changes as ``in`` and ``out``: the composed graph is plain, and prints as one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlgraph.bind import NAME
from rlgraph.catalog import find_hook, find_op
from rlgraph.edits import has, put
from rlgraph.errors import Mark, fail, nearest
from rlgraph.graph import Call, Node
from rlgraph.interpolate import INTERPOLATION, filled
from rlgraph.op import Hook, Op
from rlgraph.ports import declared, hooked, wanted, written
from rlgraph.source import OPEN, Tree

Path = tuple[str, ...]
TRAIN, EVAL = ("nodes",), ("eval", "nodes")


def insert(tree: Tree, name: str, content: Tree) -> Tree:
    """Splice a node onto a column: whoever read it, in training, evaluation and report, reads the new one.

    Args:
        tree: a graph as written.
        name: of the new node.
        content: the new node, and ``on``, the column that it is put on.

    Raises:
        GraphError: nothing writes the column, the new node does not read it or writes not one column, or its
            name is taken.
    """
    mark, on = content.key or content.mark, content.get("on")
    if on is None or not isinstance(on.value, str):
        law = f"`insert` puts a node on a column: {name}: {{op: ..., on: COLUMN}}"
        raise fail("bad-edit", law, mark)
    writer = next((path for path, node in _nodes(tree) if on.value in written(node).values()), None)
    if writer is None:
        raise _no_column(tree, on.value, on.mark)
    _free(tree, name, mark, {*_names(tree)})
    body = content.with_item("on", None)
    column = _spliced(name, body, on)
    _free(tree, column, mark, {*_columns(tree)})
    tree = _redirect(tree, on.value, column, mark)
    return _put_behind(tree, writer, name, body)


def rename(tree: Tree, old: str, new: Tree) -> Tree:
    """Give a node, ``models.NAME``, or a column another name, wherever the graph refers to it.

    A column that a node gives its own name to is renamed with the node.

    Raises:
        GraphError: there is nothing of the old name, or there is something of the new one.
    """
    mark = new.key or new.mark
    if not isinstance(new.value, str) or not NAME.fullmatch(new.value):
        law = f"`rename` takes a name and the new one, as {old}: other; letters, digits and _"
        raise fail("bad-edit", law, new.mark)
    section, _, model = old.rpartition(".")
    if section == "models" and has(tree, ("models", model)):
        _free(tree, new.value, new.mark, {*tree.items["models"].items})
        return _rename_model(tree, model, new.value, mark)
    node = old.removeprefix("nodes.")
    if node in _names(tree):
        _free(tree, new.value, new.mark, {*_names(tree)})
        return _rename_node(tree, node, new.value, mark)
    if old in _columns(tree):
        return _rename_column(tree, old, new.value, mark)
    known = [*dict.fromkeys((*_names(tree), *_columns(tree)))]
    known += [f"models.{name}" for name in _section(tree, ("models",)).items]
    hint = f"did you mean `models.{old}`?" if f"models.{old}" in known else nearest(old, known)
    raise fail("edit-missing", f"no node, model or column is called `{old}`", mark, known, hint)


def _spliced(name: str, body: Tree, on: Tree) -> str:
    """The column that an inserted node writes."""
    node = _node(name, filled(body)[0])
    if node is None or node.call is None:
        raise fail("no-op", f"node `{name}` does not say what it is", body.key, remedy=f"{name}: {{op: ...}}")
    if on.value not in (node.call.ins.get(port.name, port.name) for port in wanted(node)):
        law = f"node `{name}` ({node.op.name}) is put on column `{on.value}`, and does not read it"
        remedy = f"say which of its parameters does: in: {{PARAMETER: {on.value}}}"
        raise fail("insert-unread", law, on.mark, sorted(declared(node)), remedy)
    column, *more = written(node).values() or [""]
    if more or not column:
        columns = ", ".join([column, *more])
        law = f"`insert` takes an op that writes one column; {node.op.name} writes {columns or 'none'}"
        raise fail("insert-outputs", law, body.key, remedy="use `add`, and set `in` of its readers")
    return column


def _rename_model(tree: Tree, old: str, new: str, mark: Mark) -> Tree:
    tree = _refer_by(tree, ("model", "of", "tokenizer"), old, new, mark)
    return _refer(_rekey(tree, ("models",), old, new), f"models.{old}", f"models.{new}")


def _refer_by(tree: Tree, keys: tuple[str, ...], old: str, new: str, mark: Mark) -> Tree:
    """What keys of nodes refer to under its new name; a model with the version that is asked for."""
    for section in (TRAIN, EVAL):
        for name, node in _section(tree, section).items.items():
            for key in keys:
                item = node.get(key)
                thing, at, version = str(item.value).partition("@") if item else ("", "", "")
                if item and thing == old:
                    tree = put(tree, (*section, name, key), replace(item, value=new + at + version), mark)
    return tree


def _rename_node(tree: Tree, old: str, new: str, mark: Mark) -> Tree:
    lone = {path: node for path, node in _nodes(tree) if path[-1] == old and "" in written(node)}
    if any(old in written(node).values() for node in lone.values()):
        tree = _rename_column(tree, old, new, mark)
    tree = _refer_by(tree, ("rows",), old, new, mark)
    for section in (TRAIN, EVAL):
        path = (*section, old)
        if not has(tree, path):
            continue
        if path in lone and has(tree, (*path, "out", old)):  # a lone output goes by the name of its node
            node = _rekey(_section(tree, path), ("out",), old, new)
            tree = put(tree, path, _with_ports(node, "out"), mark)
        tree = _rekey(tree, section, old, new)
        tree = _refer(tree, ".".join(path), ".".join((*section, new)))
    return tree


def _rename_column(tree: Tree, old: str, new: str, mark: Mark) -> Tree:
    _free(tree, new, mark, {*_columns(tree)})
    there = _sections(tree, old)
    for path, node in _nodes(tree):
        if {port.name for port in wanted(node) if port.optional} & {*_readers(path, node, new, there)}:
            law = f"`{new}` is what node `{path[-1]}` reads where there is such a column; there is none now"
            raise fail("name-taken", law, mark, remedy="take another name")
    tree = _map_ports(tree, "out", lambda _, node: [p for p, c in _outs(node).items() if c == old], new, mark)
    return _redirect(tree, old, new, mark)


def _redirect(tree: Tree, old: str, new: str, mark: Mark) -> Tree:
    """What read one column reads another: parameters of nodes, and ``eval.report``."""
    there = _sections(tree, old, new)
    tree = _map_ports(tree, "in", lambda path, node: _readers(path, node, old, there), new, mark)
    for metric, column in _section(tree, ("eval", "report")).items.items():
        if column.value == old:
            tree = put(tree, ("eval", "report", metric), replace(column, value=new), mark)
    return tree


def _sections(tree: Tree, *columns: str) -> set[Path]:
    """Where nodes write one of some columns: in training, in evaluation."""
    return {path[:-1] for path, node in _nodes(tree) if {*columns} & {*written(node).values()}}


def _readers(path: Path, node: Node, column: str, there: set[Path]) -> list[str]:
    """The parameters through which a node reads a column, which the sections ``there`` write."""
    ins = node.call.ins if node.call else {}
    # in training, what only an evaluation writes is not there: a parameter that can do without reads nothing
    absent = path[:-1] == TRAIN and TRAIN not in there
    ports = [port for port in wanted(node) if not (absent and port.optional and port.name not in ins)]
    return [port.name for port in ports if ins.get(port.name, port.name) == column]


def _map_ports(
    tree: Tree, key: str, ports: Callable[[Path, Node], list[str]], column: str, mark: Mark
) -> Tree:
    """``in`` or ``out`` of every node with some of its ports on another column."""
    for section in (TRAIN, EVAL):  # evaluation second: its nodes inherit from those that are changed by then
        for path, node in [(p, n) for p, n in _nodes(tree) if p[:-1] == section]:
            for port in ports(path, node):
                tree = _map_port(tree, path, key, port, Tree(column, mark, mark))
    return tree


def _map_port(tree: Tree, path: Path, key: str, port: str, column: Tree) -> Tree:
    node = _section(tree, path)
    inherits = path[:-1] == EVAL and not node.get("op")
    above = _section(tree, (*TRAIN, path[-1])) if inherits else node
    ports = node.get(key) or above.get(key) or Tree({}, column.mark, column.mark)
    node = node.with_item(key, ports.with_item(port, column))
    return put(tree, path, node if inherits else _with_ports(node, key), column.mark)


def _with_ports(node: Tree, key: str) -> Tree:
    """A node without the ports in ``in`` or ``out`` that say what holds anyway."""
    ports = {name: column for name, column in node.items[key].items.items() if column.value != name}
    return node.with_item(key, replace(node.items[key], value=ports) if ports else None)


def _refer(tree: Tree, old: str, new: str) -> Tree:
    """The tree with ``${old...}`` as ``${new...}``."""

    def renamed(match: re.Match[str]) -> str:
        name = match[1]
        return f"${{{new}{name[len(old) :]}}}" if f"{name}.".startswith(f"{old}.") else match[0]

    if isinstance(tree.value, dict):
        return replace(tree, value={name: _refer(child, old, new) for name, child in tree.value.items()})
    if isinstance(tree.value, list):
        return replace(tree, value=[_refer(child, old, new) for child in tree.value])
    if not isinstance(tree.value, str):
        return tree
    return replace(tree, value=INTERPOLATION.sub(renamed, tree.value))


def _rekey(tree: Tree, section: Path, old: str, new: str) -> Tree:
    """One item of a mapping under another name, in its place."""
    inside = _section(tree, section)
    items = {new if name == old else name: child for name, child in inside.items.items()}
    return put(tree, section, replace(inside, value=items), inside.mark)


def _put_behind(tree: Tree, writer: Path, name: str, node: Tree) -> Tree:
    """A new node, behind the one that writes what it reads."""
    section = _section(tree, writer[:-1])
    items: dict[str, Tree] = {}
    for other, child in section.items.items():
        items |= {other: child, name: node} if other == writer[-1] else {other: child}
    return put(tree, writer[:-1], replace(section, value=items), node.mark)


def _section(tree: Tree, path: Path) -> Tree:
    for part in path:
        tree = tree.get(part) or Tree({}, tree.mark)
    return tree


def _names(tree: Tree) -> Iterator[str]:
    """Names of nodes, those that only ``eval`` has included."""
    for section in (TRAIN, EVAL):
        yield from _section(tree, section).items


def _columns(tree: Tree) -> Iterator[str]:
    for _, node in _nodes(tree):
        yield from written(node).values()


def _nodes(tree: Tree) -> Iterator[tuple[Path, Node]]:
    """Every node with its place; those of ``eval`` as they are with its changes."""
    plain, _ = filled(tree)
    train = _section(plain, TRAIN).items
    places: list[tuple[Path, Tree]] = [((*TRAIN, name), node) for name, node in train.items()]
    for name, change in _section(plain, EVAL).items.items():
        inherits = name in train and not change.get("op")
        whole = replace(change, value={**train[name].items, **change.items}) if inherits else change
        places.append(((*EVAL, name), whole))
    for path, body in places:
        if node := _node(path[-1], body):
            yield path, node


def _node(name: str, tree: Tree) -> Node | None:
    """A node as far as its edges go, or None for what binding will refuse."""
    named = tree.get("op")
    if named is None or not isinstance(named.value, str):
        return None
    op, target = find_op(named.value, named.mark)
    hooks = {n: hook for n, kind, item in hooked(op, tree) if (hook := _hook(kind, item))}
    call = Call(op, target, _attributes(op, tree), _ports(tree, "in"), _ports(tree, "out"))
    return Node(name, call=call, hooks=hooks, mark=tree.key)


def _hook(hook: type[Hook], tree: Tree) -> Call | None:
    kind = tree.get("kind")
    if kind is None or not isinstance(kind.value, str) or kind.value == OPEN:
        return None
    op, target = find_hook(hook, kind.value, kind.mark)
    return Call(op, target, _attributes(op, tree))


def _attributes(op: Op, tree: Tree) -> dict[str, Any]:
    """Attributes as given, over the defaults; not checked."""
    fields = op.attributes.model_fields.items()
    defaults = {name: field.default for name, field in fields if not field.is_required()}
    return defaults | {
        name: child.plain() for name, child in tree.items.items() if name in op.attributes.model_fields
    }


def _ports(tree: Tree, key: str) -> dict[str, str]:
    ports = tree.get(key)
    return {name: str(column.value) for name, column in ports.items.items()} if ports else {}


def _outs(node: Node) -> Mapping[str, str]:
    """The name by which ``out`` knows each output -> its column."""
    return {output or node.name: column for output, column in written(node).items()}


def _free(tree: Tree, name: str, mark: Mark, taken: set[str]) -> None:
    if name in taken:
        raise fail("name-taken", f"there is a `{name}` already", mark, remedy="take another name")


def _no_column(tree: Tree, name: str, mark: Mark) -> Exception:
    known = [*dict.fromkeys(_columns(tree))]
    return fail("edit-missing", f"no node writes column `{name}`", mark, known, nearest(name, known))
