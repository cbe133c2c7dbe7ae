"""Traces a graph backwards: the writer of a column, the sampler of its rows; draws and refuses the piece."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rlgraph.errors import Problem
from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.steps import Kind


def writer(graph: Graph, column: str) -> Node:
    """Return the node that the user wrote behind a column, through repeats and selections."""
    node = graph.writers[column]
    return node if node.call else writer(graph, node.reads[node.writes.index(column)])


def sampler(graph: Graph, domain: str | None) -> Node | None:
    """Return the rollout that made a domain's rows, recorded or not, or None where they come from data.

    Of rows that a node holds it is the one that made them when they came.
    """
    lines = graph.origins(domain)
    makers = [graph.node(made.maker) for line in lines for made in line if not made.parts]
    sampling = (n for n in makers if n.call and (n.op.engine == "serve" or n.op.declared.recorded))
    held = (line[-1].held for line in lines if line and line[-1].held)
    return next(sampling, None) or next(filter(None, (sampler(graph, rows) for rows in held)), None)


def older(graph: Graph, node: Node, iterations: int) -> Node:
    """Return a node with the weights that it had some iterations ago."""
    updates = sum(other.updates and other.model == node.model for other in graph.nodes)
    return node if node.version is None else replace(node, version=node.version - iterations * updates)


def when_they_came(graph: Graph, node: Node) -> Graph:
    """Return the graph as the oldest rows of a node see it that another holds: as it was when they came.

    What led to them read older weights then, and what holds them hands on what that wrote.
    """
    made = next((line[-1] for line in graph.origins(node.domain) if line and line[-1].held), None)
    if made is None:
        return graph
    holder = graph.node(made.maker)
    ins, outs = holder.called.ins, holder.called.outs
    before = reached(graph.needs, [holder.name], waits=lambda node, _: graph.node(node).inserted)
    passing = replace(
        holder,
        kind=Kind.SELECT,
        call=None,
        reads=tuple(ins.get(port, holder.reads[0]) for port in outs),
        writes=tuple(outs.values()),
    )
    nodes = (older(graph, other, made.ages[1]) if other.name in before else other for other in graph.nodes)
    whole = replace(made, parent=made.held, filtered=True, held="")
    seen = replace(
        graph,
        nodes=tuple(passing if other is holder else other for other in nodes),
        domains={**graph.domains, made.name: whole},
    )
    return when_they_came(seen, node)


def read_from(graph: Graph, node: Node, parameter: str) -> Node | None:
    """Return the node that the user wrote behind a parameter's column, or None where it reads nothing."""
    column = node.call.ins.get(parameter) if node.call else None
    return writer(graph, column) if column else None


def source(node: Node) -> str:
    """Return the writer of a column in words, with its weights."""
    return f"written by `{node.name}` ({node.op.name}" + (f", {node.weights})" if node.model else ")")


def refusal(
    kind: str,
    law: str,
    graph: Graph,
    node: Node,
    earlier: Sequence[str],
    remedy: str,
    grade: Literal["error", "warning"] = "error",
) -> Problem:
    """Return a law that a node breaks, drawn with the ``earlier`` nodes; ``remedy`` is an edit.

    The place of the problem is the edit that changed the node, else one that changed an earlier node, else
    the node.
    """
    mark = node.mark
    for name in (node.name, *earlier):
        edit = graph.node(name).edited
        if edit:
            mark = edit
            break
    return Problem(kind, law, mark, (), remedy, draw(graph, [*earlier, node.name]), grade)


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
