"""The columns that a node reads and writes, by the declarations of its op and of its hooks.

Shared by the pass that infers edges and the edits that rewire them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from rlgraph.ir.graph import Call, Node
from rlgraph.ops.declare import Hook, Op, Port
from rlgraph.syntax.source import OPEN, Tree


def wanted(node: Node) -> Iterator[Port]:
    """Yield the parameters through which a node reads columns: its op's and its hooks'.

    What one of them can't do without is read by the others too, though they could.
    """
    ports = [
        port
        for call, provided in _calls(node)
        for port in _under(call.op, call.attributes)
        if port.name not in provided
    ]
    needed = {port.name for port in ports if not port.optional}
    for port in ports:
        yield replace(port, optional=port.name not in needed)


def declared(node: Node) -> set[str]:
    """Return the names of all parameters through which a node may read, whatever its attributes."""
    return {p.name for call, provided in _calls(node) for p in call.op.inputs if p.name not in provided}


def written(node: Node) -> dict[str, str]:
    """Return the op's name of each output -> its column: a lone output takes the node's name."""
    names = [(port.name, port.name or node.name) for port in node.op.outputs]
    return {port: node.called.outs.get(name, name) for port, name in names}


def _calls(node: Node) -> Iterator[tuple[Call, tuple[str, ...]]]:
    """Yield the functions that a node calls, each with the parameters that are filled in for it."""
    yield node.called, ()
    for path, hook in node.hooks.items():
        if (kind := node.op.hook(path)).reads:
            yield hook, kind.provides


def hooked(op: Op, tree: Tree) -> Iterator[tuple[str, type[Hook], Tree]]:
    """Yield the hooks that attributes name: ``loss``, ``tools.calculator``, with kind and tree."""
    for attribute, kind in op.hooks.items():
        item = tree.get(attribute)
        if item is None or item.value in (None, OPEN):
            continue
        if attribute not in op.several:
            yield attribute, kind, item
        elif item.is_map:
            yield from ((f"{attribute}.{name}", kind, child) for name, child in item.items.items())


def _under(op: Op, attributes: Mapping[str, object]) -> Iterator[Port]:
    for port in op.inputs:
        attribute = op.declared.when.get(port.name)
        if attribute is None:
            yield port
        elif attributes.get(attribute):
            yield replace(port, optional=False)


@dataclass(frozen=True)
class HeldRows:
    """Nodes that hold rows (``Declaration.holds``), the nodes on the rows that they make, and what they hold.

    Attributes:
        on: a node that holds rows -> those on the rows that it makes.
        columns: a node that holds rows -> the names of the columns that it holds, if its rows have them.
    """

    on: Mapping[str, Set[str]]
    columns: Mapping[str, Sequence[str]]

    @staticmethod
    def of(nodes: Sequence[Node]) -> HeldRows:
        """Find them: a node says so by ``rows``, or can't do without a column that they alone write."""
        holders, writers = [node for node in nodes if node.op.declared.holds], dict[str, set[str]]()
        for node in nodes if holders else ():
            for column in written(node).values():
                writers.setdefault(column, set()).add(node.name)
        on = {holder.name: _on(holder, nodes, writers) for holder in holders}
        columns = {}
        for holder in holders:
            mine, own = {holder.name, *on[holder.name]}, {*declared(holder), *written(holder)}
            wanted = {column for node in nodes if node.name in mine - {holder.name} for column in _read(node)}
            columns[holder.name] = [c for c in sorted(wanted - own) if c in writers and not writers[c] & mine]
        return HeldRows(on, columns)

    def above(self, name: str) -> Set[str]:
        """Return the nodes that hold rows which a node is on, or which it holds itself."""
        return {holder for holder, on in self.on.items() if name == holder or name in on}

    def before(self, node: Node, writers: Iterable[Node], nodes: Sequence[Node]) -> Set[str]:
        """Return the nodes that are bound before one: those of the writers of its columns that it can read.

        Before one that holds rows come all that do not see what it makes.
        """
        above = self.above(node.name) - {node.name}
        seen = {writer.name for writer in writers if self.above(writer.name) <= above}
        waited = nodes if node.name in self.on else ()
        others = (other.name for other in waited if not self.above(other.name))
        return {*seen, *others} - {node.name}


def with_held(node: Node, names: Sequence[str], ports: Sequence[Port] | None = None) -> Node:
    """Return a node with ports, in and out, for the columns that it holds; their types come later."""
    op = node.op
    ports = [replace(op.outputs[0], name=name) for name in names] if ports is None else ports
    inputs, outputs = ((*(p for p in own if p.name not in names), *ports) for own in (op.inputs, op.outputs))
    return replace(node, call=replace(node.called, op=replace(op, inputs=inputs, outputs=outputs)))


def _on(holder: Node, nodes: Sequence[Node], writers: Mapping[str, Set[str]]) -> Set[str]:
    found, before = {holder.name}, set[str]()
    while found != before:
        before = {*found}
        alone = {column for column, names in writers.items() if names <= found}
        found |= {node.name for node in nodes if found & {*node.rows} or alone & _read(node, asked=True)}
    return found - {holder.name}


def _read(node: Node, asked: bool = False) -> set[str]:
    """Return the columns that a node reads, or those alone that it can't do without."""
    ins, by = node.called.ins, {node.route.by} if node.route else set()
    read = (port for port in wanted(node) if not (asked and port.optional) or port.name in ins)
    return by | {ins.get(port.name, port.name) for port in read}
