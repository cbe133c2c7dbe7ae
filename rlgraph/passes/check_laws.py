"""Check what ops assume of the graph around them, and what holds of all rows (rlgraph/laws)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from rlgraph.errors import Problem, raise_problems
from rlgraph.ir.actions import Kind
from rlgraph.ir.graph import Call, Graph, Node
from rlgraph.ir.regions import aged
from rlgraph.ir.trace import sampler, when_they_came
from rlgraph.laws.nodes import CALL_LAWS
from rlgraph.laws.rows import ROW_LAWS, cut_groups
from rlgraph.laws.views import CallView, NodeView

View = TypeVar("View")


def raise_broken(laws: Sequence[Callable[[View], Iterable[Problem]]], *views: View) -> None:
    """Check each view by each law.

    Raises:
        GraphError: with every law that is broken.
    """
    problems: list[Problem] = []
    for view in views:
        for law in laws:
            problems += law(view)
    raise_problems(problems)


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
    graphs = _graphs_by_part(graph)
    for node in graph.nodes:
        if not node.call:
            continue
        # rows of data are in one update with sampled ones by the graph's own word
        sampled = [view for view in graphs if sampler(view, node.domain)]
        views = [when_they_came(view, node) for view in sampled or graphs]

        problems: dict[tuple[str, str], Problem] = {}  # by law and remedy: parts may break it alike
        for call in (node.call, *node.hooks.values()):
            for law, problem in _broken_by_call(node, call, views):
                problems[law, problem.remedy] = problem
        yield from problems.values()


def _broken_by_call(node: Node, call: Call, graphs: Sequence[Graph]) -> Iterator[tuple[str, Problem]]:
    """Yield each law that one call breaks in some graph, with the problem."""
    for law in call.op.declared.assumes:
        for graph in graphs:
            for problem in CALL_LAWS[law](CallView(graph, node, call)):
                yield law, problem


def _broken_by_rows(graph: Graph) -> Iterator[Problem]:
    for node in graph.nodes:
        for law in ROW_LAWS:
            yield from law(NodeView(graph, node))


def _graphs_by_part(graph: Graph) -> Sequence[Graph]:
    """Return the graph as the rows of each part of what is merged see it: the nodes that wrote theirs."""
    merges = [node for node in graph.nodes if node.kind is Kind.MERGE]
    count = max((len(merge.reads) for merge in merges), default=1)
    if count == 1:
        return [graph]
    return [_seen_by_part(graph, merges, index) for index in range(count)]


def _seen_by_part(graph: Graph, merges: Sequence[Node], index: int) -> Graph:
    """Return the graph in which each of the merges, and each union of rows, has one part alone."""
    merges_of_part = {}
    for merge in merges:
        merges_of_part[merge.name] = replace(merge, reads=_part_or_last(merge.reads, index))
    domains = {}
    for name, domain in graph.domains.items():
        domains[name] = replace(domain, parts=_part_or_last(domain.parts, index))
    return replace(graph.with_nodes(merges_of_part), domains=domains)


def _part_or_last(names: tuple[str, ...], index: int) -> tuple[str, ...]:
    """Return the part at an index as the only one; the last of them where there are fewer."""
    return names[index:][:1] or names[-1:]
