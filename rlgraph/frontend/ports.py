"""The columns that a node reads and writes, by the declarations of its op and of its hooks.

Shared by the pass that infers edges and the edits that rewire them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlgraph.ir.graph import Call, Node
from rlgraph.ops.declare import Hook, Op, Port
from rlgraph.syntax.source import OPEN, Tree


def wanted(node: Node) -> Iterator[Port]:
    """Yield the parameters through which a node reads columns: its op's and its hooks'."""
    for call, provided in _calls(node):
        yield from (port for port in _under(call.op, call.attributes) if port.name not in provided)


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
