"""Verifies a graph after each pass. A failure here is a bug in the pass, not in the user's graph."""

from __future__ import annotations

from rlgraph.ir.actions import IN_PLACE
from rlgraph.ir.graph import Graph, Node
from rlgraph.passes.partition import is_laid_out

LAYS_OUT_ROWS = ("partition", "sync", "order")  # the passes behind which each node has its layout


def verify(graph: Graph, passed: str) -> None:
    """Assert the invariants that hold once a pass has run.

    Raises:
        AssertionError: naming the pass and what it broke.
    """
    names: set[str] = set()
    columns: set[str] = set()
    for node in graph.nodes:
        assert node.name not in names, f"pass {passed}: two nodes of one name"
        names.add(node.name)
        for column in node.writes:
            assert column not in columns, f"pass {passed}: a column with two writers"
            columns.add(column)

    for node in graph.nodes:
        _verify_edges(node, names, columns, passed)
        if passed in LAYS_OUT_ROWS:
            _verify_layouts(graph, node, passed)
    if passed == "order":
        _verify_order(graph)


def _verify_edges(node: Node, names: set[str], columns: set[str], passed: str) -> None:
    subject = f"pass {passed}: {node.name}"
    assert columns.issuperset(node.reads), f"{subject} reads what nothing writes"
    assert names.issuperset(node.after), f"{subject} waits for a node that is gone"
    if node.inserted:
        assert node.because, f"{subject} is inserted without a reason"
    edges_are_resolved = passed != "stream"  # by infer, which is the next pass
    if node.call and edges_are_resolved:
        columns_of_call = node.call.ins.values()
        assert columns.issuperset(columns_of_call), f"{subject}: lost edge"


def _verify_layouts(graph: Graph, node: Node, passed: str) -> None:
    if node.kind not in IN_PLACE:
        return
    for name in node.reads:
        column = graph.columns[name]
        message = f"pass {passed}: {node.name} ({node.layout}) reads {column.name} ({column.layout})"
        assert is_laid_out(graph, column, node.layout, node.pool), message


def _verify_order(graph: Graph) -> None:
    earlier_nodes: set[str] = set()
    earlier_columns: set[str] = set()
    for node in graph.nodes:
        reads = earlier_columns.issuperset(node.reads)
        assert reads, f"pass order: {node.name} stands before what it reads"
        waits = earlier_nodes.issuperset(node.after)
        assert waits, f"pass order: {node.name} stands before what it waits for"
        earlier_nodes.add(node.name)
        earlier_columns.update(node.writes)
