"""Look back through a graph: who wrote a column, who sampled its rows; draw the piece, and refuse it."""

from __future__ import annotations

from collections.abc import Sequence

from rlgraph.errors import Problem
from rlgraph.graph import Graph, Node


def writer(graph: Graph, column: str) -> Node:
    """The node that the user wrote behind a column, through repeats and selections."""
    node = graph.node(graph.columns[column].writer)
    return node if node.call else writer(graph, node.reads[node.writes.index(column)])


def sampler(graph: Graph, domain: str | None) -> Node | None:
    """The rollout that made the rows of a domain, recorded or not, or None where they come from data."""
    makers = [graph.node(made.maker) for made in graph.ancestors(domain)]
    return next((n for n in makers if n.call and (n.op.engine == "serve" or n.op.declared.recorded)), None)


def read_from(graph: Graph, node: Node, parameter: str) -> Node | None:
    """The node that the user wrote behind what a parameter reads, or None where it reads nothing."""
    column = node.call.ins.get(parameter) if node.call else None
    return writer(graph, column) if column else None


def source(node: Node) -> str:
    """Who wrote a column, in words, with its weights."""
    return f"written by `{node.name}` ({node.op.name}" + (f", {node.weights})" if node.model else ")")


def refusal(kind: str, law: str, graph: Graph, node: Node, before: Sequence[str], remedy: str) -> Problem:
    """A law of a node that the graph breaks, drawn with the nodes ``before`` it; ``remedy`` is an edit."""
    return Problem(kind, law, node.mark, (), remedy, draw(graph, [*before, node.name]))


def draw(graph: Graph, names: Sequence[str]) -> str:
    """Some nodes under one another, each with its weights and the columns that it hands to a later one.

    rollout (policy@v)
      └─ tokens, loss_mask ─> old_logprobs (ref@v)
      └─ tokens, loss_mask ─> update_policy (policy@v)
    """
    nodes = [graph.node(name) for name in dict.fromkeys(names)]
    lines = []
    for index, node in enumerate(nodes):
        later = nodes[index + 1 :]
        edges = [(_handed(graph, node, reader), reader) for reader in later]
        if index == 0 or any(columns for columns, _ in edges):
            lines.append(_label(node))
            lines += [f"  └─ {', '.join(names)} ─> {_label(reader)}" for names, reader in edges if names]
    return "\n".join(lines)


def _handed(graph: Graph, node: Node, reader: Node) -> list[str]:
    return [column for column in reader.reads if writer(graph, column) is node]


def _label(node: Node) -> str:
    return f"{node.name} ({node.weights if node.model else node.op.name})"
