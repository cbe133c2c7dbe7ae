"""Dependencies as one directed graph: of nodes of a graph by name, or of steps of a plan by number.

update_policy ──advantages──> advantages ──rewards──> rewards        an edge leads to what is needed
      └────────(waits)──────> sync:policy
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from rlgraph.ir.digraph import DiGraph, Key, Label


class Record(Protocol):
    """A node or a step. ``after`` has the keys of records that must come first, read or not."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def writes(self) -> tuple[str, ...]: ...
    @property
    def after(self) -> tuple[Any, ...]: ...


def dependencies(records: Mapping[Key, Record]) -> DiGraph[Key]:
    """Return the records by their keys, with an edge from each to every record that must come before it.

    An edge's label has the columns that the first record reads of the second; none, where it only waits.

    Raises:
        KeyError: a record reads a column that none writes.
    """
    writers = {}
    for key, record in records.items():
        for column in record.writes:
            writers[column] = key

    needs = DiGraph(records)
    for key, record in records.items():
        columns_read: dict[Key, list[str]] = defaultdict(list)  # by the record that writes them
        for column in record.reads:
            columns_read[writers[column]].append(column)
        for writer, columns in columns_read.items():
            needs.add_edge(key, writer, tuple(columns))
        for need in record.after:
            if need not in columns_read:
                needs.add_edge(key, need)
    return needs


def reached(needs: DiGraph[Key], roots: Iterable[Key], waits: Callable[[Key, Key], bool]) -> set[Key]:
    """Return the roots and all that they need, directly or through others.

    ``waits`` says whether the first of two records, which reads nothing of the second, needs it all the same.
    """

    def counts(key: Key, need: Key, columns: Label) -> bool:
        return bool(columns) or waits(key, need)

    return needs.reachable(roots, counts)
