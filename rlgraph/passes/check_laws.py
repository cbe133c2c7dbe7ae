"""Check what ops assume of the graph around them, and what holds of all rows (rlgraph/laws)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlgraph.errors import Problem, raise_problems
from rlgraph.ir.actions import Kind
from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.regions import aged
from rlgraph.ir.trace import sampler, when_they_came
from rlgraph.laws.nodes import CALL_LAWS
from rlgraph.laws.rows import ROW_LAWS, cut_groups
from rlgraph.laws.views import CallView, NodeView


def assume(graph: Graph) -> Graph:
    """Check every law of the graph's nodes, and note where a filter may have cut groups.

    Raises:
        GraphError: with every law that is broken.
    """
    oldest = aged(graph)
    problems = [*_broken_by_calls(oldest), *_broken_by_rows(oldest)]
    raise_problems(problems)
    return replace(graph, notes=(*graph.notes, *cut_groups(graph)))


def _broken_by_calls(graph: Graph) -> Iterator[Problem]:
    """Yield what breaks a law that an op names, in the graph as each part of the node's rows has it."""
    views = _views(graph)  # rows of data are in one update with sampled ones by the graph's own word
    for node in graph.nodes:
        if not node.call:
            continue
        problems: dict[tuple[str, str], Problem] = {}  # by law and remedy
        sampled = [view for view in views if sampler(view, node.domain)]
        of_parts = [when_they_came(view, node) for view in sampled or views]
        for call in (node.call, *node.hooks.values()):
            for law in call.op.declared.assumes:
                for part in of_parts:
                    for problem in CALL_LAWS[law](CallView(part, node, call)):
                        problems[law, problem.remedy] = problem
        yield from problems.values()


def _broken_by_rows(graph: Graph) -> Iterator[Problem]:
    for node in graph.nodes:
        for law in ROW_LAWS:
            yield from law(NodeView(graph, node))


def _views(graph: Graph) -> Sequence[Graph]:
    """Return the graph as the rows of each part of what is merged see it: the nodes that wrote theirs."""
    most = max((len(node.reads) for node in graph.nodes if node.kind is Kind.MERGE), default=1)
    if most == 1:
        return [graph]
    return [_view(graph, part) for part in range(most)]


def _view(graph: Graph, part: int) -> Graph:
    nodes = [_reading_part(node, part) for node in graph.nodes]
    domains = {name: _one_part(domain, part) for name, domain in graph.domains.items()}
    return replace(graph, nodes=tuple(nodes), domains=domains)


def _reading_part(node: Node, part: int) -> Node:
    if node.kind is not Kind.MERGE:
        return node
    return replace(node, reads=node.reads[part:][:1] or node.reads[-1:])


def _one_part(domain: GraphDomain, part: int) -> GraphDomain:
    return replace(domain, parts=domain.parts[part:][:1] or domain.parts[-1:])
