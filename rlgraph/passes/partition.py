"""Lays out the rows of each node on its devices, and moves columns where two nodes differ.

    one          all rows on the pool's first device
    even         split by prompt: contiguous, the samples of a prompt together
    balanced/K   samples spread so that the devices have nearly equal work in each of K mini-batches

On one device all of these are the same, and nothing is moved. A column on another pool is read where it is,
if that pool has as many devices, or all rows lie on one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from rlgraph.ir.actions import IN_PLACE, Kind
from rlgraph.ir.graph import Column, Graph, Node
from rlgraph.ir.steps import ONE, RowLayout
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
    minibatches = _minibatches(graph)
    for node in graph.in_order:
        layout = _layout(node, graph, columns, minibatches)
        devices = graph.devices[node.pool]
        elsewhere = _reads_elsewhere(graph, node, columns, layout)

        # a column is moved once, for the first reader in a layout; later ones read the same copy
        missing = [name for name in elsewhere if (name, layout, devices) not in moved]
        if missing:
            origins = {columns[name].pool for name in missing}
            has_one_pool = len(graph.devices) == 1
            place = layout if has_one_pool else f"{node.pool}/{layout}"
            copies = {}
            for name in missing:
                copy = _copy(columns[name], f"{name}@{place}", layout, node.pool)
                columns[copy.name] = copy
                copies[name] = copy.name
                moved[name, layout, devices] = copy.name
            nodes.append(_repartition(node, copies, layout, origins))

        renamed = {name: moved[name, layout, devices] for name in elsewhere}
        nodes.append(_reading(node, renamed, layout))
        for name in node.writes:
            columns[name] = replace(columns[name], layout=layout, pool=node.pool)
    return replace(graph, nodes=tuple(nodes), columns=columns)


def _reads_elsewhere(graph: Graph, node: Node, columns: Mapping[str, Column], layout: RowLayout) -> list[str]:
    """Return the columns that a node reads and whose rows do not lie as it reads them."""
    if node.kind not in IN_PLACE:
        return []
    return [name for name in node.reads if not is_laid_out(graph, columns[name], layout, node.pool)]


def _copy(column: Column, name: str, layout: RowLayout, pool: str) -> Column:
    """Return the column that has the same rows as another, in another layout or on another pool."""
    origin = column.copy_of or column.name
    return replace(column, name=name, layout=layout, pool=pool, moved=True, copy_of=origin)


def _minibatches(graph: Graph) -> dict[str | None, int]:
    """Return domain -> mini-batches of its updates; of the first, where they differ."""
    minibatches: dict[str | None, int] = {}
    for node in graph.nodes:
        if node.trains:
            minibatches.setdefault(node.domain, int(node.called.value("minibatches", 1)))
    return minibatches


def is_laid_out(graph: Graph, column: Column, layout: RowLayout, pool: str) -> bool:
    """Return whether a column's rows lie as a node on ``pool`` reads them."""
    if column.layout != layout:
        return False
    return layout == ONE or graph.devices[column.pool] == graph.devices[pool]


def move_weight(column: Column) -> int:
    """Return how much a column weighs to move: a number per token weighs more than a number per row."""
    return 100 if column.type.axis else 1


def _layout(
    node: Node, graph: Graph, columns: Mapping[str, Column], minibatches: Mapping[str | None, int]
) -> RowLayout:
    """Return how the rows of a node lie on its pool's devices."""
    if graph.devices[node.pool] == 1:
        return ONE

    match node.kind:
        case Kind.REPEAT | Kind.COLLECT | Kind.MERGE:
            return EVEN
        case Kind.SELECT:
            (filtering,) = node.after
            return columns[graph.node(filtering).writes[0]].layout

    if node.op.source or _needs_all_rows(node, graph):
        return ONE
    if node.op.declared.makes:
        return EVEN
    if node.op.engine == "train":
        # a node that scores is laid out as the update of its rows, so that nothing moves between them
        of_domain = minibatches.get(node.domain, 1)
        return RowLayout("balanced", node.called.value("minibatches", of_domain))
    return _layout_of_most(node, columns)


def _layout_of_most(node: Node, columns: Mapping[str, Column]) -> RowLayout:
    """Return the layout in which most of what a node reads lies.

    A node that compares rows of a group needs one of the two layouts that keep groups together.
    """
    weights: Counter[RowLayout] = Counter()
    for name in node.reads:
        weights[columns[name].layout] += move_weight(columns[name])
    compares_rows = node.op.declared.rows == "group" or node.op.declared.filters
    if not compares_rows:
        return max(weights, key=lambda layout: weights[layout])
    if weights[ONE] > weights[EVEN]:
        return ONE
    return EVEN


def _needs_all_rows(node: Node, graph: Graph) -> bool:
    """Return whether a node's rows must be together: its op says so, or its groups are scattered."""
    rows = node.op.declared.rows
    if rows == "group":
        source = graph.ancestors(node.domain)[-1]
        return DOMAINS[source.kind].answered  # a source's samples lie by row, not by group
    return rows == "all"


def _repartition(reader: Node, moves: dict[str, str], layout: RowLayout, origins: set[str]) -> Node:
    subject = f"the {reader.kind} for `{reader.name}`" if reader.inserted else f"`{reader.name}`"
    reason = BECAUSE[layout.way]
    if origins != {reader.pool}:
        reason = f"runs on pool {reader.pool}, and they are on {' and '.join(sorted(origins))}"
    return Node(
        name=f"repartition:{reader.name}",
        kind=Kind.REPARTITION,
        reads=tuple(moves),
        writes=tuple(moves.values()),
        domain=reader.domain,
        pool=reader.pool,
        layout=layout,
        because=f"{subject} {reason}",
    )


def _reading(node: Node, renamed: dict[str, str], layout: RowLayout) -> Node:
    """Return the node with its reads under their new names."""
    reads = tuple(renamed.get(column, column) for column in node.reads)
    if node.call is None or not renamed:
        return replace(node, reads=reads, layout=layout)
    ins = {port: renamed.get(column, column) for port, column in node.call.ins.items()}
    return replace(node, reads=reads, call=replace(node.call, ins=ins), layout=layout)
