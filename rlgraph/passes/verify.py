"""Verifies a graph after each pass. A failure here is a bug in the pass, not in the user's graph."""

from __future__ import annotations

from rlgraph.ir.actions import IN_PLACE
from rlgraph.ir.graph import Graph, Node
from rlgraph.passes.partition import lies_so


def verify(graph: Graph, passed: str) -> None:
    """Assert the invariants that hold once a pass has run.

    Raises:
        AssertionError: naming the pass and what it broke.
    """
    names = [node.name for node in graph.nodes]
    assert len(names) == len(set(names)), f"pass {passed}: two nodes of one name"
    written = [column for node in graph.nodes for column in node.writes]
    assert len(written) == len(set(written)), f"pass {passed}: a column with two writers"
    for node in graph.nodes:
        _verify_edges(node, set(names), set(written), passed)
        if passed in ("partition", "sync", "order"):
            _verify_layouts(graph, node, passed)
    if passed == "order":
        _verify_order(graph)


def _verify_edges(node: Node, names: set[str], columns: set[str], passed: str) -> None:
    assert columns.issuperset(node.reads), f"pass {passed}: {node.name} reads what nothing writes"
    if node.call and passed != "stream":  # edges are resolved by infer, which comes next
        assert columns.issuperset(node.call.ins.values()), f"pass {passed}: {node.name}: lost edge"
    assert names.issuperset(node.after), f"pass {passed}: {node.name} waits for a node that is gone"
    assert not node.inserted or node.because, f"pass {passed}: {node.name} is inserted without a reason"


def _verify_layouts(graph: Graph, node: Node, passed: str) -> None:
    if node.kind not in IN_PLACE:
        return
    for name in node.reads:
        column = graph.columns[name]
        message = f"pass {passed}: {node.name} ({node.layout}) reads {column.name} ({column.layout})"
        assert lies_so(graph, column, node.layout, node.pool), message


def _verify_order(graph: Graph) -> None:
    names, columns = set[str](), set[str]()  # of the nodes so far
    for node in graph.nodes:
        assert columns.issuperset(node.reads), f"pass order: {node.name} stands before what it reads"
        assert names.issuperset(node.after), f"pass order: {node.name} stands before what it waits for"
        names.add(node.name)
        columns.update(node.writes)
