"""Traces a graph backwards: the writer of a column, the sampler of its rows; draws and refuses the piece."""

from __future__ import annotations

from collections.abc import Sequence

from rlgraph.errors import Problem
from rlgraph.ir.graph import Graph, Node


def writer(graph: Graph, column: str) -> Node:
    """Return the node that the user wrote behind a column, through repeats and selections."""
    node = graph.node(graph.columns[column].writer)
    return node if node.call else writer(graph, node.reads[node.writes.index(column)])


def sampler(graph: Graph, domain: str | None) -> Node | None:
    """Return the rollout that made a domain's rows, recorded or not, or None where they come from data."""
    line = (ancestor for line in graph.origins(domain) for ancestor in line if not ancestor.parts)
    makers = [graph.node(ancestor.maker) for ancestor in line]
    return next((n for n in makers if n.call and (n.op.engine == "serve" or n.op.declared.recorded)), None)


def read_from(graph: Graph, node: Node, parameter: str) -> Node | None:
    """Return the node that the user wrote behind a parameter's column, or None where it reads nothing."""
    column = node.call.ins.get(parameter) if node.call else None
    return writer(graph, column) if column else None


def source(node: Node) -> str:
    """Return the writer of a column in words, with its weights."""
    return f"written by `{node.name}` ({node.op.name}" + (f", {node.weights})" if node.model else ")")


def refusal(kind: str, law: str, graph: Graph, node: Node, before: Sequence[str], remedy: str) -> Problem:
    """Return a law that the graph breaks, drawn with the nodes ``before`` it; ``remedy`` is an edit.

    Its place is that of an edit of one of them, the node's own first, or else the node.
    """
    edits = [edit for name in (node.name, *before) if (edit := graph.node(name).edited)]
    return Problem(kind, law, next(iter(edits), node.mark), (), remedy, draw(graph, [*before, node.name]))


def draw(graph: Graph, names: Sequence[str]) -> str:
    """Draw some nodes under one another, each with its weights and the columns that it hands on.

    rollout (policy@v)
      └─ tokens, loss_mask ─> old_logprobs (ref@v)
      └─ tokens, loss_mask ─> update_policy (policy@v)
    """
    nodes = [graph.node(name) for name in dict.fromkeys(names)]
    lines = []
    for index, node in enumerate(nodes):
        later = nodes[index + 1 :]
        edges = [
            ([graph.columns[c].copy_of or c for c in other.reads if writer(graph, c) is node], other)
            for other in later
        ]
        if index == 0 or any(columns for columns, _ in edges):
            lines.append(_label(node))
            lines += [f"  └─ {', '.join(names)} ─> {_label(reader)}" for names, reader in edges if names]
    return "\n".join(lines)


def _label(node: Node) -> str:
    return f"{node.name} ({node.weights if node.model else node.op.name})"
