"""Weights as versions: readers of ``policy@v``, writers of ``policy@v+1``, and the order that follows.

With ``schedule.staleness: k``, a node that generates on another pool than its model trains on reads the
weights that the model had k iterations ago, ``policy@v-k``: it runs that far ahead.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from rlgraph.errors import raise_problems
from rlgraph.ir.graph import Graph, Node
from rlgraph.laws.streams import is_on_separate_pool, runs_ahead


def version(graph: Graph) -> Graph:
    """Give each node the version of its model that it reads, and the nodes that must come before it.

    Readers of ``policy@v`` come before the first update; updates follow one another as written; readers of
    ``policy@next`` come after the last. What joins an update comes before it, and after the update before.

    Raises:
        GraphError: generation is to run ahead of training, but no pool is its own.
    """
    updates: dict[str, list[Node]] = defaultdict(list)
    readers: dict[str, list[Node]] = defaultdict(list)
    terms: dict[str, list[Node]] = defaultdict(list)
    graph, first = _copies(graph)
    for node in graph.nodes:
        terms[node.joins].append(node)
        if node.model and not node.joins:
            (updates if node.updates else readers)[node.model].append(node)
    changed: dict[str, Node] = {}
    for model, nodes in readers.items():
        for node in nodes:
            last = tuple(n.name for n in updates[model][-1:]) if node.reads_next else ()
            at = len(updates[model]) if node.reads_next else -len(updates[model]) * ahead(graph, node)
            if node.op.declared.recorded:  # sampled before the run, by weights of an unknown version
                last, at = (), -1
            changed[node.name] = replace(node, version=at, after=node.after + last)
    for model, nodes in updates.items():
        before = (*(n.name for n in readers[model] if not n.reads_next), *first[model])
        for count, node in enumerate(nodes):
            earlier = tuple(other.name for other in nodes[:count][-1:])
            for term in terms[node.name]:
                changed[term.name] = replace(term, version=count, after=term.after + earlier)
            before += tuple(term.name for term in terms[node.name])
            changed[node.name] = replace(node, version=count, after=node.after + before)
            before = (node.name,)
    raise_problems(runs_ahead(graph))
    return replace(graph, nodes=tuple(changed.get(node.name, node) for node in graph.nodes))


def _copies(graph: Graph) -> tuple[Graph, dict[str, list[str]]]:
    """Return the graph with the versions that copies copy; per model, the copies before its updates."""
    first: dict[str, list[str]] = defaultdict(list)
    nodes = []
    for node in graph.nodes:
        if node.of:
            updates = [other.name for other in graph.nodes if other.updates and other.model == node.of]
            last = tuple(updates[-1:]) if node.of_next else ()
            first[node.of] += [] if node.of_next else [node.name]
            node = replace(node, of_version=len(updates) * node.of_next, after=node.after + last)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)), first


def ahead(graph: Graph, node: Node) -> int:
    """Return the iterations that a node runs ahead of its model's updates: generation on its own pool."""
    if graph.report or node.op.engine != "serve":
        return 0
    return graph.schedule.staleness if is_on_separate_pool(graph, node) else 0
