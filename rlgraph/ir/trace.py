"""Trace a graph backwards, from a column to its writer and to the rollout that made its rows.

A problem that is found on such a path is drawn with the nodes along it (``refusal``).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rlgraph.errors import Problem
from rlgraph.ir.actions import Kind
from rlgraph.ir.dependencies import reached
from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.graph import Graph, Node


def writer(graph: Graph, column: str) -> Node:
    """Return the node that the user wrote behind a column, through repeats and selections."""
    node = graph.writers[column]
    while node.call is None:
        column = node.reads[node.writes.index(column)]
        node = graph.writers[column]
    return node


def sampler(graph: Graph, domain: str | None) -> Node | None:
    """Return the rollout that made a domain's rows, recorded or not, or None where they come from data.

    Of rows that a node holds it is the one that made them when they came.
    """
    lines = graph.origins(domain)
    for line in lines:
        for rows in line:
            maker = graph.node(rows.maker)
            if rows.parts or maker.call is None:
                continue
            if maker.op.engine == "serve" or maker.op.declared.recorded:
                return maker
    for line in lines:
        rollout = sampler(graph, line[-1].held) if line else None
        if rollout:
            return rollout
    return None


def older(graph: Graph, node: Node, iterations: int) -> Node:
    """Return a node with the weights that it had some iterations ago."""
    if node.version is None:
        return node
    updates = len(graph.updates(node.model))
    return replace(node, version=node.version - iterations * updates)


def when_they_came(graph: Graph, node: Node) -> Graph:
    """Return the graph as the oldest rows of a node see it that another holds: as it was when they came.

    What led to them read older weights then, and what holds them hands on what that wrote.
    """
    while True:
        waiting = _held_rows(graph, node)
        if waiting is None:
            return graph
        graph = _when_rows_came(graph, waiting)


def _held_rows(graph: Graph, node: Node) -> GraphDomain | None:
    """Return the rows of earlier iterations from which those of a node come, if they come from such."""
    for line in graph.origins(node.domain):
        if line and line[-1].held:
            return line[-1]
    return None


def _when_rows_came(graph: Graph, waiting: GraphDomain) -> Graph:
    """Return the graph with a selection in place of the node that holds rows, and older weights before it."""
    holder = graph.node(waiting.maker)
    ins = holder.called.ins
    outs = holder.called.outs
    led_to_it = reached(graph.needs, [holder.name], waits=lambda name, _: graph.node(name).inserted)
    selection = replace(
        holder,
        kind=Kind.SELECT,
        call=None,
        reads=tuple(ins.get(port, holder.reads[0]) for port in outs),
        writes=tuple(outs.values()),
    )
    oldest = waiting.ages[1]
    changed = {name: older(graph, graph.node(name), oldest) for name in led_to_it}
    changed[holder.name] = selection
    selected = replace(waiting, parent=waiting.held, filtered=True, held="")
    domains = {**graph.domains, waiting.name: selected}
    return replace(graph.with_nodes(changed), domains=domains)


def read_from(graph: Graph, node: Node, parameter: str) -> Node | None:
    """Return the node that the user wrote behind a parameter's column, or None where it reads nothing."""
    if node.call is None:
        return None
    column = node.call.ins.get(parameter)
    return writer(graph, column) if column else None


def source(node: Node) -> str:
    """Return the writer of a column in words, with its weights."""
    weights = f", {node.weights}" if node.model else ""
    return f"written by `{node.name}` ({node.op.name}{weights})"


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
    edits = [graph.node(name).edited for name in (node.name, *earlier)]
    mark = next(filter(None, edits), node.mark)
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
            columns = _columns_read(graph, reader, node)
            if columns:
                edges.append(f"  └─ {', '.join(columns)} ─> {_label(reader)}")
        if index == 0 or edges:
            lines += [_label(node), *edges]
    return "\n".join(lines)


def _columns_read(graph: Graph, reader: Node, node: Node) -> list[str]:
    """Return the columns of a node that another reads, as the user calls them."""
    columns = []
    for column in reader.reads:
        if writer(graph, column) is node:
            columns.append(graph.columns[column].copy_of or column)
    return columns


def _label(node: Node) -> str:
    return f"{node.name} ({node.weights if node.model else node.op.name})"
