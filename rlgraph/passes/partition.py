"""Lays out the rows of each node on its devices, and moves columns where two nodes differ.

    one          all rows on the pool's first device
    even         split by prompt: contiguous, the samples of a prompt together
    balanced/K   samples spread so that the devices have nearly equal work in each of K mini-batches

On one device all of these are the same, and nothing is moved. A column on another pool is read where it is,
if that pool has as many devices, or all rows lie on one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rlgraph.ir.graph import Column, Graph, Node
from rlgraph.ir.steps import ONE, Kind, RowLayout
from rlgraph.ops.column_types import DOMAINS

EVEN = RowLayout("even")

BECAUSE = {
    ONE: "needs all rows together",
    EVEN: "works on each device's share of the prompts",
    "balanced": "runs with nearly equal work on all devices",
}


def partition(graph: Graph) -> Graph:
    """Give every node and column a layout; insert a ``repartition`` before a reader of another layout."""
    columns = dict(graph.columns)
    moved: dict[tuple[str, RowLayout, int], str] = {}  # (column, layout, devices) -> its copy in that layout
    nodes: list[Node] = []
    # domain -> mini-batches of its updates (of the first, where they differ)
    updates = [node for node in reversed(graph.nodes) if node.trains]
    steps = {node.domain: int(node.called.value("minibatches", 1)) for node in updates}
    for node in graph.in_order:
        layout, devices = _layout(node, graph, columns, steps), graph.devices[node.pool]
        fixed = node.kind.facts.in_place  # others take rows from wherever they are
        elsewhere = [c for c in node.reads if fixed and not lies_so(graph, columns[c], layout, node.pool)]
        wrong = [c for c in elsewhere if (c, layout, devices) not in moved]
        if wrong:
            place = layout if len(graph.devices) == 1 else f"{node.pool}/{layout}"
            moves = {c: f"{c}@{place}" for c in wrong}
            moved.update({(c, layout, devices): copy for c, copy in moves.items()})
            for column, copy in moves.items():
                there = replace(columns[column], name=copy, layout=layout, pool=node.pool, moved=True)
                columns[copy] = replace(there, copy_of=there.copy_of or column)
            nodes.append(_repartition(node, moves, layout, {columns[c].pool for c in wrong}))
        nodes.append(_reading(node, {c: moved[c, layout, devices] for c in elsewhere}, layout))
        columns.update({c: replace(columns[c], layout=layout, pool=node.pool) for c in node.writes})
    return replace(graph, nodes=tuple(nodes), columns=columns)


def lies_so(graph: Graph, column: Column, layout: RowLayout, pool: str) -> bool:
    """Return whether a column's rows lie as a node on ``pool`` reads them."""
    alike = layout == ONE or graph.devices[column.pool] == graph.devices[pool]
    return column.layout == layout and alike


def _layout(node: Node, graph: Graph, columns: dict[str, Column], steps: dict[str | None, int]) -> RowLayout:
    if graph.devices[node.pool] == 1:
        return ONE
    if node.kind.facts.layout == EVEN:
        return EVEN
    if node.kind.facts.layout == "filter":
        (filtered,) = node.after
        return columns[graph.node(filtered).writes[0]].layout
    rows = node.op.declared.rows
    scattered = rows == "group" and DOMAINS[graph.ancestors(node.domain)[-1].kind].answered
    if node.op.source or rows == "all" or scattered:  # a source's samples lie by row, not by group
        return ONE
    if node.op.declared.makes:
        return EVEN
    if node.op.engine == "train":
        return RowLayout("balanced", node.called.value("minibatches", steps.get(node.domain, 1)))
    weights: Counter[RowLayout] = Counter()
    for name in node.reads:
        # a number per token weighs more to move than a number per row
        weights[columns[name].layout] += 100 if columns[name].type.axis else 1
    if rows == "group" or node.op.declared.filters:
        return max((ONE, EVEN), key=lambda layout: (weights[layout], layout == EVEN))
    return max(weights, key=lambda layout: weights[layout])


def _repartition(reader: Node, moves: dict[str, str], layout: RowLayout, origins: set[str]) -> Node:
    who = f"the {reader.kind} for `{reader.name}`" if reader.inserted else f"`{reader.name}`"
    why = BECAUSE[layout.way]
    if origins != {reader.pool}:
        why = f"runs on pool {reader.pool}, and they are on {' and '.join(sorted(origins))}"
    return Node(
        name=f"repartition:{reader.name}",
        kind=Kind.REPARTITION,
        reads=tuple(moves),
        writes=tuple(moves.values()),
        domain=reader.domain,
        pool=reader.pool,
        layout=layout,
        because=f"{who} {why}",
    )


def _reading(node: Node, renamed: dict[str, str], layout: RowLayout) -> Node:
    """Return the node with its reads under their new names."""
    reads = tuple(renamed.get(column, column) for column in node.reads)
    call = node.call
    if call and renamed:
        call = replace(call, ins={port: renamed.get(column, column) for port, column in call.ins.items()})
    return replace(node, reads=reads, call=call, layout=layout)
