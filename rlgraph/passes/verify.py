"""Verifies a graph after each pass. A failure here is a bug in the pass, not in the user's graph."""

from __future__ import annotations

from rlgraph.ir.graph import Graph
from rlgraph.passes.partition import lies_so


def verify(graph: Graph, after: str) -> None:
    """Assert the invariants that hold once the pass ``after`` has run.

    Raises:
        AssertionError: naming the pass and what it broke.
    """
    names = [node.name for node in graph.nodes]
    assert len(names) == len(set(names)), f"pass {after}: two nodes of one name"
    written = [column for node in graph.nodes for column in node.writes]
    assert len(written) == len(set(written)), f"pass {after}: a column with two writers"
    known, columns = set(names), set(written)
    for node in graph.nodes:
        unwritten = set(node.reads) - columns
        assert not unwritten, f"pass {after}: {node.name} reads {unwritten}, which nothing writes"
        ins = set(node.call.ins.values() if node.call else ())
        assert ins <= columns, f"pass {after}: {node.name}: lost edge"
        assert set(node.after) <= known, f"pass {after}: {node.name} waits for a node that is gone"
        assert not node.inserted or node.because, f"pass {after}: {node.name} is inserted without a reason"
    if after in ("partition", "sync", "order"):
        _one_layout_a_node(graph, after)
    if after == "order":
        _needs_come_first(graph)


def _one_layout_a_node(graph: Graph, after: str) -> None:
    for node in graph.nodes:
        for column in [graph.columns[name] for name in node.reads if node.kind.facts.in_place]:
            law = f"pass {after}: {node.name} ({node.layout}) reads {column.name} ({column.layout})"
            assert lies_so(graph, column, node.layout, node.pool), law


def _needs_come_first(graph: Graph) -> None:
    seen: set[str] = set()
    columns: set[str] = set()
    for node in graph.nodes:
        assert columns.issuperset(node.reads), f"pass order: {node.name} stands before what it reads"
        assert seen.issuperset(node.after), f"pass order: {node.name} stands before what it waits for"
        seen.add(node.name)
        columns.update(node.writes)
