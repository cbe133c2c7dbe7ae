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
    before, earlier = set[str](), set[str]()  # nodes that stand before one, and the columns that they write
    for node in graph.nodes:
        assert columns.issuperset(node.reads), f"pass {after}: {node.name} reads what nothing writes"
        ins = node.call.ins.values() if node.call and after != "stream" else ()  # edges are resolved by infer
        assert columns.issuperset(ins), f"pass {after}: {node.name}: lost edge"
        assert known.issuperset(node.after), f"pass {after}: {node.name} waits for a node that is gone"
        assert not node.inserted or node.because, f"pass {after}: {node.name} is inserted without a reason"
        if after in ("partition", "sync", "order") and node.kind.facts.in_place:
            for column in map(graph.columns.__getitem__, node.reads):
                law = f"pass {after}: {node.name} ({node.layout}) reads {column.name} ({column.layout})"
                assert lies_so(graph, column, node.layout, node.pool), law
        if after == "order":
            assert earlier.issuperset(node.reads), f"pass order: {node.name} stands before what it reads"
            assert before.issuperset(node.after), f"pass order: {node.name} stands before what it waits for"
        before.add(node.name)
        earlier.update(node.writes)
