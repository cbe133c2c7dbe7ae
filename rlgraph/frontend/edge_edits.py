"""Edits of edges: ``insert`` a node on a column, ``rename`` what others refer to.

Edges follow from names, so both must know which parameters read a column without saying so. They ask the ops'
declarations, and write what changes as ``in`` and ``out``: the composed graph is plain, and prints as one.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rlgraph.errors import Mark, fail, nearest
from rlgraph.frontend.bind_call import bind_call, names
from rlgraph.frontend.ports import input_names, input_ports, output_columns
from rlgraph.frontend.tree_paths import changed, put
from rlgraph.ir.graph import Node
from rlgraph.syntax.interpolate import INTERPOLATION, filled
from rlgraph.syntax.source import Tree
from rlgraph.syntax.validate import NAME, Binder

TreePath = tuple[str, ...]
TRAIN = ("nodes",)
EVAL = ("eval", "nodes")


def insert(tree: Tree, name: str, content: Tree) -> Tree:
    """Splice a node onto a column: whoever read it, in training, evaluation and report, reads the new one.

    ``content`` is the new node, and ``on``, the column that it is put on.

    Raises:
        GraphError: nothing writes the column, the new node does not read it or writes not one column, or its
            name is taken.
    """
    mark = content.key or content.mark
    on = content.get("on")
    if on is None or not isinstance(on.value, str):
        raise fail("bad-edit", f"`insert` puts a node on a column: {name}: {{op: ..., on: COLUMN}}", mark)
    *section_path, writer = _writer_of(tree, on)
    _require_free(name, mark, _names(tree))
    body = content.with_item("on", None)
    column = _spliced(name, body, on)
    _require_free(column, mark, _columns(tree))

    # readers are redirected while the new node is not yet among them: it goes on to read the old column
    tree = _redirect(tree, on.value, column, mark, tree)
    section = _section(tree, tuple(section_path))
    items: dict[str, Tree] = {}
    for node, child in section.items.items():
        items[node] = child
        if node == writer:
            items[name] = body  # nodes are listed in this order, so the new one comes after its writer
    return put(tree, tuple(section_path), replace(section, value=items), body.mark)


def _writer_of(tree: Tree, column: Tree) -> TreePath:
    for path, node in _nodes(tree):
        if column.value in output_columns(node).values():
            return path
    known = [*dict.fromkeys(_columns(tree))]
    law = f"no node writes column `{column.value}`"
    raise fail("edit-missing", law, column.mark, known, nearest(column.value, known))


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
    if section == "models" and tree.find(("models", model)):
        return _rename_model(tree, model, new.value, new.mark, mark)
    node = old.removeprefix("nodes.")
    nodes = _names(tree)
    if node in nodes:
        _require_free(new.value, new.mark, nodes)
        return _rename_node(tree, node, new.value, mark)
    columns = [*_columns(tree)]
    if old in columns:
        return _rename_column(tree, old, new.value, mark)

    models = [f"models.{name}" for name in _section(tree, ("models",)).items]
    known = [*dict.fromkeys((*nodes, *columns)), *models]
    hint = nearest(old, known)
    if f"models.{old}" in models:
        hint = f"did you mean `models.{old}`?"
    raise fail("edit-missing", f"no node, model or column is called `{old}`", mark, known, hint)


def _rename_model(tree: Tree, old: str, new: str, name_mark: Mark, mark: Mark) -> Tree:
    _require_free(new, name_mark, tree.items["models"].items)
    tree = _refer_by(tree, ("model", "of", "tokenizer"), old, new, mark)
    tree = _rekey(tree, ("models",), old, new)
    return _refer(tree, f"models.{old}", f"models.{new}")


def _spliced(name: str, body: Tree, on: Tree) -> str:
    """Return the column that an inserted node writes."""
    node = _node(name, filled(body)[0])
    if node is None:
        raise fail("no-op", f"node `{name}` does not say what it is", body.key, remedy=f"{name}: {{op: ...}}")
    columns_read = [node.called.ins.get(port.name, port.name) for port in input_ports(node)]
    if on.value not in columns_read:
        law = f"node `{name}` ({node.op.name}) is put on column `{on.value}`, and does not read it"
        remedy = f"say which of its parameters does: in: {{PARAMETER: {on.value}}}"
        raise fail("insert-unread", law, on.mark, sorted(input_names(node)), remedy)
    columns = [*output_columns(node).values()]
    if len(columns) != 1:
        listing = ", ".join(columns) or "none"
        law = f"`insert` takes an op that writes one column; {node.op.name} writes {listing}"
        raise fail("insert-outputs", law, body.key, remedy="use `add`, and set `in` of its readers")
    return columns[0]


def _refer_by(tree: Tree, keys: tuple[str, ...], old: str, new: str, mark: Mark) -> Tree:
    """Rename what keys of nodes refer to; a model keeps the version that is asked for."""
    for path, body in _bodies(tree):
        for key in keys:
            item = body.get(key)
            if item is None:
                continue
            renamed = _referring(item, old, new)
            if renamed is not item:
                tree = put(tree, (*path, key), renamed, mark)
    return tree


def _referring(item: Tree, old: str, new: str) -> Tree:
    """Return a value that refers to a node or model by its new name; the same where it refers to another."""
    if isinstance(item.value, list):  # of `rows`: several nodes that make them
        return item.mapped(lambda leaf: replace(leaf, value=new) if leaf.value == old else leaf)
    name, separator, version = str(item.value).partition("@")
    if name != old:
        return item
    return replace(item, value=f"{new}{separator}{version}")


def _rename_node(tree: Tree, old: str, new: str, mark: Mark) -> Tree:
    lone_outputs = _lone_outputs(tree, old)
    is_column_too = any(old in columns for columns in lone_outputs.values())
    if is_column_too:
        tree = _rename_column(tree, old, new, mark)
    tree = _refer_by(tree, ("rows", "state", "joins"), old, new, mark)
    for section in (TRAIN, EVAL):
        path = (*section, old)
        if not tree.find(path):
            continue
        # in `out`, an output without a name of its own is called by the node's
        if path in lone_outputs and tree.find((*path, "out", old)):
            section_of_node = _rekey(_section(tree, path), ("out",), old, new)
            tree = put(tree, path, _with_ports(section_of_node, "out"), mark)
        tree = _rekey(tree, section, old, new)
        tree = _refer(tree, ".".join(path), ".".join((*section, new)))
    return tree


def _lone_outputs(tree: Tree, name: str) -> dict[TreePath, list[str]]:
    """Return the places of a node whose column goes by the node's name, in training and evaluation.

    With each come the columns that it writes: ``out`` may give another name to the one that goes by its own.
    """
    columns_by_place = {}
    for path, node in _nodes(tree):
        columns = output_columns(node)
        if path[-1] == name and "" in columns:
            columns_by_place[path] = [*columns.values()]
    return columns_by_place


def _rename_column(tree: Tree, old: str, new: str, mark: Mark) -> Tree:
    _require_free(new, mark, _columns(tree))
    # a node that reads the new name where there is such a column would start to do so
    sections = _sections(tree, old)
    for path, node in _nodes(tree):
        optional = {port.name for port in input_ports(node) if port.optional}
        readers = _readers(tree, path, node, new, sections, old)
        if not optional.isdisjoint(readers):
            law = f"`{new}` is what node `{path[-1]}` reads where there is such a column; there is none now"
            raise fail("name-taken", law, mark, remedy="take another name")

    def outs(_: TreePath, node: Node) -> list[str]:
        outputs = [output for output, column in output_columns(node).items() if column == old]
        return [output or node.name for output in outputs]

    renamed = _map_ports(tree, "out", outs, new, mark)
    return _redirect(renamed, old, new, mark, tree)


def _redirect(tree: Tree, old: str, new: str, mark: Mark, original: Tree) -> Tree:
    """Redirect the readers of one column to another: parameters of nodes, and ``eval.report``.

    ``original`` is the tree in which the column was written under its old name.
    """
    sections = _sections(tree, old, new)

    def ins(path: TreePath, node: Node) -> list[str]:
        return _readers(original, path, node, old, sections, old)

    tree = _map_ports(tree, "in", ins, new, mark)
    for path, body in _bodies(tree):
        route_column = body.find(("rows", "by"))
        if route_column and route_column.value == old:
            tree = put(tree, (*path, "rows", "by"), replace(route_column, value=new), mark)
    for metric, column in _section(tree, ("eval", "report")).items.items():
        if column.value == old:
            tree = put(tree, ("eval", "report", metric), replace(column, value=new), mark)
    return tree


def _sections(tree: Tree, *columns: str) -> set[TreePath]:
    """Return the sections in which nodes write one of some columns: training, evaluation."""
    sections = set()
    for path, node in _nodes(tree):
        if not set(columns).isdisjoint(output_columns(node).values()):
            sections.add(path[:-1])
    return sections


def _readers(
    tree: Tree, path: TreePath, node: Node, column: str, sections: set[TreePath], name_in_tree: str
) -> list[str]:
    """Return the parameters through which a node reads a column, which some sections write."""
    ins = node.called.ins
    ports = [port for port in input_ports(node) if ins.get(port.name, port.name) == column]
    # in training, a column that only an evaluation writes is absent: an optional parameter reads nothing
    is_in_training = path[:-1] == TRAIN
    is_absent = is_in_training and TRAIN not in sections
    has_token_port = any(port.optional and port.type.axis for port in ports)
    is_along_others = has_token_port and _is_along_other_tokens(tree, node, name_in_tree)
    readers = []
    for port in ports:
        misses_tokens = is_along_others and port.type.axis is not None
        reads_nothing = port.optional and (is_absent or misses_tokens)
        if port.name in ins or not reads_nothing:
            readers.append(port.name)
    return readers


def _is_along_other_tokens(tree: Tree, node: Node, column: str) -> bool:
    """Return whether a column is along the tokens of other rows than those that a node maps `tokens` to."""
    tokens = node.called.ins.get("tokens")
    if not tokens:
        return False
    for _, maker in _nodes(tree):
        if not maker.op.declared.makes:
            continue
        columns = output_columns(maker).values()
        if column in columns and tokens not in columns:
            return True
    return False


def _map_ports(
    tree: Tree, key: str, ports: Callable[[TreePath, Node], list[str]], column: str, mark: Mark
) -> Tree:
    """Redirect some ports in ``in`` or ``out`` of every node to another column."""
    for section in (TRAIN, EVAL):  # evaluation second: its nodes inherit from those that are changed by then
        nodes = [(path, node) for path, node in _nodes(tree) if path[:-1] == section]
        for path, node in nodes:
            for port in ports(path, node):
                tree = _map_port(tree, path, key, port, Tree(column, mark, mark))
    return tree


def _map_port(tree: Tree, path: TreePath, key: str, port: str, column: Tree) -> Tree:
    node = _section(tree, path)
    ports = node.get(key)
    inherits = path[:-1] == EVAL and not node.get("op")
    if inherits and ports is None:
        ports = _section(tree, (*TRAIN, path[-1])).get(key)
    if ports is None:
        ports = Tree({}, column.mark, column.mark)
    node = node.with_item(key, ports.with_item(port, column))
    if not inherits:  # a change of an evaluation states defaults too: its parent may have others
        node = _with_ports(node, key)
    return put(tree, path, node, column.mark)


def _with_ports(node: Tree, key: str) -> Tree:
    """Return a node without the ports in ``in`` or ``out`` that state the default."""
    section = node.items[key]
    ports = {name: column for name, column in section.items.items() if column.value != name}
    if not ports:
        return node.with_item(key, None)
    return node.with_item(key, replace(section, value=ports))


def _refer(tree: Tree, old: str, new: str) -> Tree:
    """Return the tree with ``${old...}`` as ``${new...}``."""

    def renamed(match: re.Match[str]) -> str:
        name = match[1]
        if not f"{name}.".startswith(f"{old}."):
            return match[0]
        return f"${{{new}{name.removeprefix(old)}}}"

    def referred(leaf: Tree) -> Tree:
        if not isinstance(leaf.value, str):
            return leaf
        return replace(leaf, value=INTERPOLATION.sub(renamed, leaf.value))

    return tree.mapped(referred)


def _rekey(tree: Tree, section: TreePath, old: str, new: str) -> Tree:
    """Return the mapping with one item under another name, in its place."""
    inside = _section(tree, section)
    items = {}
    for name, child in inside.items.items():
        items[new if name == old else name] = child
    return put(tree, section, replace(inside, value=items), inside.mark)


def _section(tree: Tree, path: TreePath) -> Tree:
    return tree.find(path) or Tree({}, tree.mark)


def _bodies(tree: Tree) -> list[tuple[TreePath, Tree]]:
    """Return what the graph says of each node, with its place: in ``eval`` a change, or a node of its own."""
    bodies = []
    for section in (TRAIN, EVAL):
        for name, body in _section(tree, section).items.items():
            bodies.append(((*section, name), body))
    return bodies


def _names(tree: Tree) -> list[str]:
    """Return the names of nodes, those that only ``eval`` has included."""
    return [path[-1] for path, _ in _bodies(tree)]


def _columns(tree: Tree) -> Iterator[str]:
    for _, node in _nodes(tree):
        yield from output_columns(node).values()


def _nodes(tree: Tree) -> Iterator[tuple[TreePath, Node]]:
    """Yield every node with its place; those of ``eval`` as they are with its changes."""
    plain, _ = filled(tree)
    train = _section(plain, TRAIN).items
    for path, body in _bodies(plain):
        name = path[-1]
        if path[:-1] == EVAL:
            body = changed(train.get(name), body)
        node = _node(name, body)
        if node is not None:
            yield path, node


def _node(name: str, tree: Tree) -> Node | None:
    """Return a node with its edges, or None for one that binding will refuse."""
    binder = Binder(strict=False)
    bound = bind_call(name, tree, binder)
    if bound is None:
        return None
    call, hooks = bound
    call = replace(call, ins=names(tree, "in", binder), outs=names(tree, "out", binder))
    return Node(name, call=call, hooks=hooks, mark=tree.key)


def _require_free(name: str, mark: Mark, used: Iterable[str]) -> None:
    if name in used:
        raise fail("name-taken", f"there is a `{name}` already", mark, remedy="take another name")
