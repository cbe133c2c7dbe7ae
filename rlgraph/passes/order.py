"""Put the nodes in an order in which each comes after what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlgraph.errors import fail
from rlgraph.graph import Graph, Node
from rlgraph.passes.refill import collects, members


def order(graph: Graph) -> Graph:
    """The nodes in the order in which they will run: as written, each need just before its first user.

    Raises:
        GraphError: nodes that wait for each other, by columns or by versions.
    """
    nodes = sequence(graph.nodes)
    for collect in collects(nodes):
        nodes = _together(nodes, collect)
    return replace(graph, nodes=tuple(nodes))


def _together(nodes: Sequence[Node], collect: Node) -> list[Node]:
    """The nodes of a region right before what collects their rows: they are repeated as one piece."""
    region = members(nodes, collect)
    names = {node.name for node in region}
    at = nodes.index(collect)
    return [*(node for node in nodes[:at] if node.name not in names), *region, *nodes[at:]]


def needs(node: Node, writers: dict[str, str]) -> list[str]:
    """Names of the nodes that must come before a node."""
    return list(dict.fromkeys([writers[column] for column in node.reads] + list(node.after)))


def sequence(nodes: Sequence[Node]) -> list[Node]:
    """A depth-first topological order, without recursion: a graph may be 10,000 nodes deep."""
    writers = {column: node.name for node in nodes for column in node.writes}
    by_name = {node.name: node for node in nodes}
    placed: dict[str, Node] = {}
    for root in nodes:
        path = [(root, iter(needs(root, writers)))] if root.name not in placed else []
        open_names = {root.name}
        while path:
            node, rest = path[-1]
            need = next((name for name in rest if name not in placed), None)
            if need is None:
                placed[node.name] = node
                open_names.discard(node.name)
                path.pop()
            elif need in open_names:
                raise _cycle([n.name for n, _ in path], need, node)
            else:
                open_names.add(need)
                path.append((by_name[need], iter(needs(by_name[need], writers))))
    return list(placed.values())


def _cycle(path: list[str], need: str, node: Node) -> Exception:
    circle = [*path[path.index(need) :], need]
    law = "nodes wait for each other: " + " needs ".join(f"`{name}`" for name in circle)
    remedy = "a reader of `model@next` comes after its update, and a reader of the version on entry before it"
    return fail("cycle", law, node.mark, remedy=remedy)
