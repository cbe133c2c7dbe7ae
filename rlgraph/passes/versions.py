"""Weights as versions: readers of ``policy@v``, writers of ``policy@v+1``, and the order that follows.

With ``schedule.buffer: {staleness: k, by: batch}``, a node that generates on another pool than its model
trains on reads the weights that the model had k iterations ago, ``policy@v-k``: it runs that far ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
    graph, copies = _with_copied_versions(graph)
    readers: dict[str, list[Node]] = defaultdict(list)
    updates: dict[str, list[Node]] = defaultdict(list)
    terms: dict[str, list[Node]] = defaultdict(list)  # by the update that they join
    for node in graph.nodes:
        if node.joins:
            terms[node.joins].append(node)
        elif node.model and node.updates:
            updates[node.model].append(node)
        elif node.model:
            readers[node.model].append(node)

    versioned: dict[str, Node] = {}
    for model, nodes in readers.items():
        for node in nodes:
            versioned[node.name] = _reading(graph, node, updates[model])
    for model, nodes in updates.items():
        read_entry = [node.name for node in readers[model] if not node.reads_next]
        for node in _updating(nodes, terms, [*read_entry, *copies[model]]):
            versioned[node.name] = node
    raise_problems(runs_ahead(graph))
    return graph.with_nodes(versioned)


def _reading(graph: Graph, node: Node, updates: Sequence[Node]) -> Node:
    """Return a node that reads its model with the version that it reads."""
    if node.op.declared.recorded:  # sampled before the run, by weights of an unknown version
        return replace(node, version=-1)
    if node.reads_next:
        final = tuple(update.name for update in updates[-1:])
        return replace(node, version=len(updates), after=node.after + final)
    return replace(node, version=-len(updates) * iterations_ahead(graph, node))


def _updating(
    updates: Sequence[Node], terms: Mapping[str, Sequence[Node]], earlier: Sequence[str]
) -> Iterator[Node]:
    """Yield the updates of a model, one after the other, and before each the terms that join it.

    The first comes after the nodes ``earlier``, which read the version on entry.
    """
    waits = tuple(earlier)
    previous: tuple[str, ...] = ()
    for version, update in enumerate(updates):
        joining = terms.get(update.name, ())
        for term in joining:
            yield replace(term, version=version, after=term.after + previous)
        names = tuple(term.name for term in joining)
        yield replace(update, version=version, after=update.after + waits + names)
        previous = (update.name,)
        waits = previous


def _with_copied_versions(graph: Graph) -> tuple[Graph, dict[str, list[str]]]:
    """Return the graph with the versions that copies copy, and per model the copies before its updates."""
    copies: dict[str, list[str]] = defaultdict(list)
    versioned: dict[str, Node] = {}
    for node in graph.nodes:
        if not node.of:
            continue
        if node.of_next:
            updates = [update.name for update in graph.updates(node.of)]
            after = (*node.after, *updates[-1:])
            versioned[node.name] = replace(node, of_version=len(updates), after=after)
        else:
            copies[node.of].append(node.name)
            versioned[node.name] = replace(node, of_version=0)
    return graph.with_nodes(versioned), copies


def iterations_ahead(graph: Graph, node: Node) -> int:
    """Return the iterations that a node runs ahead of its model's updates: generation on its own pool."""
    generates = node.op.engine == "serve"
    if graph.report or not generates:
        return 0
    if not is_on_separate_pool(graph, node):
        return 0
    return graph.schedule.ahead
