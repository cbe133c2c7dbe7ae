"""Dependencies as one directed graph: of nodes of a graph by name, or of steps of a plan by number.

update_policy ──advantages──> advantages ──rewards──> rewards        an edge leads to what is needed
      └────────(waits)──────> sync:policy
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import chain
from typing import Any, Protocol, TypeVar

import networkx as nx

Key = TypeVar("Key", bound=Hashable)


class Record(Protocol):
    """A node or a step. ``after`` has the keys of records that must come first, read or not."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def writes(self) -> tuple[str, ...]: ...
    @property
    def after(self) -> tuple[Any, ...]: ...


def dependencies(records: Mapping[Key, Record]) -> nx.DiGraph[Key]:
    """Return the records by their keys, with an edge from each to every record that must come before it.

    An edge's ``columns`` are those that the first record reads of the second; none, where it only waits.

    Raises:
        KeyError: a record reads a column that none writes.
    """
    needs = nx.DiGraph()
    writers = {column: key for key, record in records.items() for column in record.writes}
    needs.add_nodes_from(records)
    for key, record in records.items():
        read: dict[Key, list[str]] = {}
        for column in record.reads:
            read.setdefault(writers[column], []).append(column)
        before = (*read, *record.after)
        needs.add_edges_from((key, need, {"columns": read.get(need, ())}) for need in before)
    return needs


def reached(needs: nx.DiGraph[Key], roots: Iterable[Key], waits: Callable[[Key, Key], bool]) -> set[Key]:
    """Return the roots and all that they need, directly or through others.

    ``waits`` says whether the first of two records, which reads nothing of the second, needs it all the same.
    """

    def counts(key: Key, need: Key) -> bool:
        return bool(needs.edges[key, need]["columns"]) or waits(key, need)

    return {*chain.from_iterable(nx.bfs_layers(nx.subgraph_view(needs, filter_edge=counts), [*roots]))}
