"""The columns that a node reads and writes, by the declarations of its op and of its hooks.

Shared by the pass that infers edges and the edits that rewire them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from rlgraph.ir.graph import Call, Node
from rlgraph.ops.declare import Hook, Op, Port
from rlgraph.records import dataclass
from rlgraph.syntax.source import OPEN, Tree


def input_ports(node: Node) -> Iterator[Port]:
    """Yield the parameters through which a node reads columns: its op's and its hooks'.

    What one of them can't do without is read by the others too, though they could.
    """
    ports: list[Port] = []
    for call, provided in _calls(node):
        active = _active(call.op, call.attributes)
        ports += [port for port in active if port.name not in provided]
    needed = {port.name for port in ports if not port.optional}
    for port in ports:
        yield replace(port, optional=port.name not in needed)


def input_names(node: Node) -> set[str]:
    """Return the names of all parameters through which a node may read, whatever its attributes."""
    names: set[str] = set()
    for call, provided in _calls(node):
        names |= {port.name for port in call.op.inputs} - {*provided}
    return names


def output_columns(node: Node) -> dict[str, str]:
    """Return the op's name of each output -> its column: a lone output takes the node's name."""
    columns = {}
    for port in node.op.outputs:
        name = port.name or node.name
        columns[port.name] = node.called.outs.get(name, name)
    return columns


def _calls(node: Node) -> Iterator[tuple[Call, tuple[str, ...]]]:
    """Yield the functions that a node calls, each with the parameters that are filled in for it."""
    yield node.called, ()
    for path, hook in node.hooks.items():
        kind = node.op.hook(path)
        if kind.reads:
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
            for name, child in item.items.items():
                yield f"{attribute}.{name}", kind, child


def _active(op: Op, attributes: Mapping[str, object]) -> Iterator[Port]:
    """Yield the parameters that an op reads with some attributes."""
    for port in op.inputs:
        switch = op.declared.when.get(port.name)
        if switch is None:
            yield port
        elif attributes.get(switch):
            yield replace(port, optional=False)


@dataclass(frozen=True)
class HeldRows:
    """Nodes that hold rows (``Declaration.holds``), the nodes on the rows that they make, and what they hold.

    Attributes:
        readers: a node that holds rows -> those on the rows that it makes.
        columns: a node that holds rows -> the names of the columns that it holds, if its rows have them.
    """

    readers: Mapping[str, Set[str]]
    columns: Mapping[str, Sequence[str]]

    @classmethod
    def find(cls, nodes: Sequence[Node]) -> HeldRows:
        """Find them: a node says so by ``rows``, or can't do without a column that they alone write."""
        holders = [node for node in nodes if node.op.declared.holds]
        if not holders:
            return cls({}, {})
        writers: dict[str, set[str]] = {}
        for node in nodes:
            for column in output_columns(node).values():
                writers.setdefault(column, set()).add(node.name)
        readers: dict[str, Set[str]] = {}
        columns: dict[str, list[str]] = {}
        for holder in holders:
            readers[holder.name] = _readers_of(holder, nodes, writers)
            columns[holder.name] = _columns_to_hold(holder, readers[holder.name], nodes, writers)
        return cls(readers, columns)

    def holders_of(self, name: str) -> Set[str]:
        """Return the nodes that hold rows which a node is on, or which it holds itself."""
        holders = set()
        for holder, readers in self.readers.items():
            if name == holder or name in readers:
                holders.add(holder)
        return holders

    def predecessors(self, node: Node, writers: Iterable[Node], nodes: Sequence[Node]) -> Set[str]:
        """Return the nodes that are bound before one: those of the writers of its columns that it can read.

        Before one that holds rows come all that do not see what it makes.
        """
        holders = self.holders_of(node.name) - {node.name}
        # rows that a node holds come from nodes that do not see them: no cycle, though names are the same
        names = {writer.name for writer in writers if self.holders_of(writer.name) <= holders}
        if node.name in self.readers:
            names |= {candidate.name for candidate in nodes if not self.holders_of(candidate.name)}
        return names - {node.name}


def with_held(node: Node, names: Sequence[str], ports: Sequence[Port] | None = None) -> Node:
    """Return a node with ports, in and out, for the columns that it holds; their types come later."""
    op = node.op
    if ports is None:
        ports = [replace(op.outputs[0], name=name) for name in names]
    inputs = [*_others(op.inputs, names), *ports]
    outputs = [*_others(op.outputs, names), *ports]
    holding = replace(op, inputs=tuple(inputs), outputs=tuple(outputs))
    return replace(node, call=replace(node.called, op=holding))


def _others(ports: Sequence[Port], names: Sequence[str]) -> list[Port]:
    return [port for port in ports if port.name not in names]


def _readers_of(holder: Node, nodes: Sequence[Node], writers: Mapping[str, Set[str]]) -> Set[str]:
    """Return the nodes on the rows that a node makes of those that it holds, directly or by way of others."""
    readers = {holder.name}
    while True:
        # of a column that a node outside writes as well, its rows may be meant
        columns_of_readers = {column for column, names in writers.items() if names <= readers}
        further = set()
        for node in nodes:
            is_on_their_rows = not readers.isdisjoint(node.rows)
            needs_their_column = not columns_of_readers.isdisjoint(columns_needed(node))
            if is_on_their_rows or needs_their_column:
                further.add(node.name)
        if further <= readers:
            return readers - {holder.name}
        readers |= further


def _columns_to_hold(
    holder: Node, readers: Set[str], nodes: Sequence[Node], writers: Mapping[str, Set[str]]
) -> list[str]:
    """Return the columns that a node holds for its readers: those that neither it nor they write."""
    columns: set[str] = set()
    for node in nodes:
        if node.name in readers:
            columns |= _columns_read(node)
    columns -= input_names(holder)
    columns -= {*output_columns(holder)}
    inside = {holder.name, *readers}
    candidates = sorted(columns & writers.keys())
    return [column for column in candidates if writers[column].isdisjoint(inside)]


def _columns_read(node: Node) -> set[str]:
    columns = columns_needed(node)
    for port in input_ports(node):
        columns.add(node.called.ins.get(port.name, port.name))
    return columns


def columns_needed(node: Node) -> set[str]:
    """Return the columns that a node can't do without: an optional one is needed where it is mapped."""
    ins = node.called.ins
    columns: set[str] = set()
    if node.route:
        columns.add(node.route.by)
    for port in input_ports(node):
        if port.name in ins:
            columns.add(ins[port.name])
        elif not port.optional:
            columns.add(port.name)
    return columns
