"""Directed graphs: the few algorithms that every check needs.

networkx has them too, and pictures and plan diffs use more of it. But to import it takes 0.1 s, a fifth of a
check, so what every check imports does without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Label = tuple[str, ...]


class DiGraph(Generic[Key]):
    """A directed graph with a label on each edge.

    Invariants:
        - nodes, the successors of a node and its predecessors are in the order in which they were added;
        - an edge that is added again keeps its place, and gets the new label;
        - both ends of an edge are nodes.
    """

    def __init__(self, nodes: Iterable[Key] = (), edges: Iterable[tuple[Key, Key]] = ()) -> None:
        self._successors: dict[Key, dict[Key, Label]] = {}
        self._predecessors: dict[Key, dict[Key, Label]] = {}
        for node in nodes:
            self.add_node(node)
        for tail, head in edges:
            self.add_edge(tail, head)

    def add_node(self, node: Key) -> None:
        self._successors.setdefault(node, {})
        self._predecessors.setdefault(node, {})

    def add_edge(self, tail: Key, head: Key, label: Label = ()) -> None:
        self.add_node(tail)
        self.add_node(head)
        self._successors[tail][head] = label
        self._predecessors[head][tail] = label

    def __iter__(self) -> Iterator[Key]:
        return iter(self._successors)

    def successors(self, node: Key) -> Mapping[Key, Label]:
        """Return the heads of the edges that start at a node, each with the edge's label."""
        return self._successors[node]

    def predecessors(self, node: Key) -> Mapping[Key, Label]:
        """Return the tails of the edges that end at a node, each with the edge's label."""
        return self._predecessors[node]

    def edges(self) -> Iterator[tuple[Key, Key, Label]]:
        """Yield each edge as its tail, its head and its label."""
        for tail, heads in self._successors.items():
            for head, label in heads.items():
                yield tail, head, label

    def subgraph(self, nodes: Iterable[Key]) -> DiGraph[Key]:
        """Return a new graph of some nodes and the edges between them."""
        members = set(nodes)
        graph = DiGraph(node for node in self if node in members)
        for tail, head, label in self.edges():
            if tail in members and head in members:
                graph.add_edge(tail, head, label)
        return graph

    def reachable(
        self, starts: Iterable[Key], follows: Callable[[Key, Key, Label], bool] | None = None
    ) -> set[Key]:
        """Return the nodes that edges lead to from some nodes, and these.

        ``follows`` says whether an edge counts, by its tail, head and label; without it, every edge does.
        """
        if follows is None:
            return _search(starts, self._successors.__getitem__)

        def followed_heads(tail: Key) -> Iterator[Key]:
            for head, label in self._successors[tail].items():
                if follows(tail, head, label):
                    yield head

        return _search(starts, followed_heads)

    def ancestors(self, node: Key) -> set[Key]:
        """Return the nodes from which edges lead to a node, without the node itself."""
        return _search([node], self._predecessors.__getitem__) - {node}

    def generations(self) -> Iterator[list[Key]]:
        """Yield the nodes in layers, tails before heads. A node on a cycle, or behind one, is in none."""
        open_edges = {node: len(tails) for node, tails in self._predecessors.items()}
        layer = [node for node, count in open_edges.items() if count == 0]
        while layer:
            yield layer
            following = []
            for tail in layer:
                for head in self._successors[tail]:
                    open_edges[head] -= 1
                    if open_edges[head] == 0:
                        following.append(head)
            layer = following

    def postorder(self) -> Iterator[Key]:
        """Yield the nodes in depth-first order, heads before tails unless they are on a cycle."""
        visited: set[Key] = set()
        for start in self:
            if start in visited:
                continue
            visited.add(start)
            path = [(start, iter(self._successors[start]))]
            while path:
                node, heads = path[-1]
                head = next((head for head in heads if head not in visited), None)
                if head is None:
                    path.pop()
                    yield node
                else:
                    visited.add(head)
                    path.append((head, iter(self._successors[head])))

    def cycle(self, starts: Iterable[Key] | None = None) -> list[Key]:
        """Return the nodes of the first cycle that a depth-first search meets, each before its head.

        ``starts`` are the nodes to search from; all, unless given. Without a cycle the list is empty.
        """
        visited: set[Key] = set()
        for start in self if starts is None else starts:
            if start in visited:
                continue
            visited.add(start)
            path = {start: iter(self._successors[start])}  # the nodes from the start to where the search is
            while path:
                node, heads = next(reversed(path.items()))
                head = next((head for head in heads if head in path or head not in visited), None)
                if head is None:
                    del path[node]
                elif head in path:
                    nodes = [*path]
                    return nodes[nodes.index(head) :]
                else:
                    visited.add(head)
                    path[head] = iter(self._successors[head])
        return []


def _search(starts: Iterable[Key], neighbours: Callable[[Key], Iterable[Key]]) -> set[Key]:
    """Return the nodes that a breadth-first search visits, the starts among them."""
    visited = set(starts)
    queue = deque(visited)
    while queue:
        for neighbour in neighbours(queue.popleft()):
            if neighbour not in visited:
                visited.add(neighbour)
                queue.append(neighbour)
    return visited
