"""Traces a graph backwards: the writer of a column, the sampler of its rows; draws and refuses the piece."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rlgraph.errors import Problem
from rlgraph.ir.actions import Kind
from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Graph, Node


def writer(graph: Graph, column: str) -> Node:
    """Return the node that the user wrote behind a column, through repeats and selections."""
    node = graph.writers[column]
    return node if node.call else writer(graph, node.reads[node.writes.index(column)])


def sampler(graph: Graph, domain: str | None) -> Node | None:
    """Return the rollout that made a domain's rows, recorded or not, or None where they come from data.

    Of rows that a node holds it is the one that made them when they came.
    """
    lines = graph.origins(domain)
    for line in lines:
        for rows in line:
            maker = graph.node(rows.maker)
            if not rows.parts and maker.call and (maker.op.engine == "serve" or maker.op.declared.recorded):
                return maker
    for line in lines:
        rollout = sampler(graph, line[-1].held) if line and line[-1].held else None
        if rollout:
            return rollout
    return None


def older(graph: Graph, node: Node, iterations: int) -> Node:
    """Return a node with the weights that it had some iterations ago."""
    updates = sum(other.updates and other.model == node.model for other in graph.nodes)
    return node if node.version is None else replace(node, version=node.version - iterations * updates)


def when_they_came(graph: Graph, node: Node) -> Graph:
    """Return the graph as the oldest rows of a node see it that another holds: as it was when they came.

    What led to them read older weights then, and what holds them hands on what that wrote.
    """
    held = next((line[-1] for line in graph.origins(node.domain) if line and line[-1].held), None)
    if held is None:
        return graph
    holder = graph.node(held.maker)
    ins, outs = holder.called.ins, holder.called.outs
    led_to_it = reached(graph.needs, [holder.name], waits=lambda name, _: graph.node(name).inserted)
    selection = replace(
        holder,
        kind=Kind.SELECT,
        call=None,
        reads=tuple(ins.get(port, holder.reads[0]) for port in outs),
        writes=tuple(outs.values()),
    )
    nodes = []
    for other in graph.nodes:
        if other is holder:
            nodes.append(selection)
        elif other.name in led_to_it:
            nodes.append(older(graph, other, held.ages[1]))
        else:
            nodes.append(other)
    kept = replace(held, parent=held.held, filtered=True, held="")
    domains = {**graph.domains, held.name: kept}
    return when_they_came(replace(graph, nodes=tuple(nodes), domains=domains), node)


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
        edges = []
        for reader in nodes[index + 1 :]:
            columns = [column for column in reader.reads if writer(graph, column) is node]
            if columns:
                labels = ", ".join(graph.columns[column].copy_of or column for column in columns)
                edges.append(f"  └─ {labels} ─> {_label(reader)}")
        if index == 0 or edges:
            lines += [_label(node), *edges]
    return "\n".join(lines)


def _label(node: Node) -> str:
    return f"{node.name} ({node.weights if node.model else node.op.name})"
