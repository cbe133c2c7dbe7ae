"""Layouts: the rows of each device. Row numbers count through the whole batch of an iteration.

A layout is a list with an int64 array of row numbers for each device. These are the layouts that the compiler
names (``rlgraph/passes/partition.py``): ``one``, ``even``, ``balanced/K``; see ``LAYOUT_MAKERS``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np

from rlgraph.ir.steps import RowLayout

Layout = list[Any]  # one int64 array of row numbers per device, in the order of its rows


class KnownRows(Protocol):
    """The inputs of a layout: the rows of an iteration, as far as they are known."""

    pools: Mapping[str, int]

    def count(self, domain: str) -> int: ...
    def lengths(self, domain: str) -> Any: ...
    def even(self, domain: str, name: RowLayout, pool: str) -> Layout: ...


def one(rows: int, devices: int) -> Layout:
    """Return all rows on the first device."""
    return [np.arange(rows), *(np.arange(0) for _ in range(devices - 1))]


def even(rows: int, devices: int) -> Layout:
    """Return contiguous shares whose sizes differ by at most one."""
    return np.array_split(np.arange(rows), devices)


def grouped(groups: Any, devices: int) -> Layout:
    """Return contiguous shares whose counts of groups differ by at most one.

    Rows that follow one another with the same number, int64 ``[rows]``, are a group.

    Example:
        >>> [rows.tolist() for rows in grouped(np.array([4, 4, 7, 9, 9, 9]), 2)]
        [[0, 1, 2], [3, 4, 5]]
    """
    number = np.cumsum(np.diff(groups, prepend=groups[:1]) != 0)
    shares = even(int(number[-1]) + 1 if len(number) else 0, devices)
    return [np.flatnonzero(np.isin(number, share)) for share in shares]


def children(layout: Layout, times: int) -> Layout:
    """Return the layout of a domain with ``times`` rows for each row of this one."""
    return [(rows[:, None] * times + np.arange(times)).reshape(-1) for rows in layout]


def some(layout: Layout, rows: Any) -> Layout:
    """Return the layout of the part of a domain that a filter kept: each row stays where it was.

    ``rows`` of the whole domain stay, int64 ``[kept]``, ascending; the n-th is row n of the part.
    """
    return [np.searchsorted(rows, held[np.isin(held, rows)]) for held in layout]


def balanced(lengths: Any, devices: int, minibatches: int) -> Layout:
    """Return rows spread so that in each mini-batch the devices hold nearly equal token counts.

    Lengths are int64 ``[rows]``, in tokens; row r of R belongs to mini-batch ``r * minibatches // R``.
    """
    rows = len(lengths)
    owner = np.arange(rows) * minibatches // max(rows, 1)
    shares: list[list[Any]] = [[] for _ in range(devices)]
    for index in range(minibatches):
        members = np.flatnonzero(owner == index)
        for share, group in zip(shares, karmarkar_karp(lengths[members], devices), strict=True):
            share.append(members[sorted(group)])
    return [np.concatenate(share) if share else np.arange(0) for share in shares]


def karmarkar_karp(weights: Sequence[int], bins: int) -> list[list[int]]:
    """Split indices into ``bins`` of nearly equal weight by the largest differencing method
    (Karmarkar and Karp, 1982; for several bins Michiels et al., 2003).

    Example:
        >>> sorted(map(sorted, karmarkar_karp([8, 7, 6, 5, 4], 2)))
        [[0, 2], [1, 3, 4]]
    """
    order = count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, weight in enumerate(weights):
        parts: list[tuple[int, list[int]]] = [(int(weight), [index])] + [(0, [])] * (bins - 1)
        heap.append((-int(weight), next(order), parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        # the heaviest part of one meets the lightest of the other
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(order), merged))
    return [group for _, group in heap[0][2]] if heap else [[] for _ in range(bins)]


def where(layout: Layout, rows: int) -> tuple[Any, Any]:
    """Return the device of each row and its place there: two int64 arrays ``[rows]``."""
    device, place = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for number, held in enumerate(layout):
        device[held], place[held] = number, np.arange(len(held))
    return device, place


@dataclass(frozen=True)
class LayoutMaker:
    """The maker of a layout of some name; ``by_lengths``: whether it needs the tokens of each row."""

    lay: Callable[[KnownRows, str, RowLayout, str], Layout]
    by_lengths: bool = False


LAYOUT_MAKERS: Mapping[str, LayoutMaker] = {
    "one": LayoutMaker(lambda rows, domain, name, pool: one(rows.count(domain), rows.pools[pool])),
    "even": LayoutMaker(lambda rows, domain, name, pool: rows.even(domain, name, pool)),
    "balanced": LayoutMaker(
        lambda rows, domain, name, pool: balanced(rows.lengths(domain), rows.pools[pool], name.minibatches),
        by_lengths=True,
    ),
}
