"""Layouts: the rows of each device. Row numbers count through the whole batch of an iteration.

A layout is a list with an int64 array of row numbers for each device. These are the layouts that the compiler
names (``rlgraph/passes/partition.py``): ``one``, ``even``, ``balanced/K``.
"""

import heapq
from itertools import pairwise
from typing import Any

import numpy as np

SWAP_ROUNDS = 16
MOST_PAIRS = 2**21  # pairs of rows beyond which swapping has next to nothing to gain
Layout = list[Any]  # one int64 array of row numbers per device, in the order of its rows


def one(rows: int, devices: int) -> Layout:
    """Return all rows on the first device."""
    return [np.arange(rows), *(np.arange(0) for _ in range(devices - 1))]


def even(rows: int, devices: int) -> Layout:
    """Return contiguous shares whose sizes differ by at most one, the larger ones spread over the devices, so
    that the servers that span several have as many rows as others.

    Example:
        >>> [share.tolist() for share in even(2, 4)]
        [[0], [], [1], []]
    """
    starts = -(-np.arange(1, devices) * rows // devices)
    return np.split(np.arange(rows), starts)


def dealt(numbers: Any, devices: int) -> Layout:
    """Return the rows of each device: those whose number, int64 ``[rows]``, modulo ``devices`` is its own.

    Example:
        >>> [rows.tolist() for rows in dealt(np.array([4, 7, 9, 10]), 2)]
        [[0, 3], [1, 2]]
    """
    return [np.flatnonzero(numbers % devices == device) for device in range(devices)]


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


def segments(layout: Layout, counts: Any) -> Layout:
    """Return the layout of a domain with ``counts``, int64 ``[rows]``, rows for each row of this one.

    Example:
        >>> [rows.tolist() for rows in segments([np.array([0, 1]), np.array([2])], np.array([2, 0, 3]))]
        [[0, 1], [2, 3, 4]]
    """
    number = np.arange(len(counts)).repeat(counts)
    return [np.flatnonzero(np.isin(number, rows)) for rows in layout]


def some(layout: Layout, rows: Any) -> Layout:
    """Return the layout of the part of a domain that a filter kept: each row stays where it was.

    ``rows`` of the whole domain stay, int64 ``[kept]``, ascending; the n-th is row n of the part.
    """
    return [np.searchsorted(rows, device_rows[np.isin(device_rows, rows)]) for device_rows in layout]


def balanced(work: Any, devices: int, minibatches: int, number: Any = None, total: int = 0) -> Layout:
    """Return rows spread so that in each mini-batch the devices have nearly equal work.

    Work is int64 ``[rows]``, in any unit; row r of R belongs to mini-batch ``r * minibatches // R``, or, of
    segments, all of sample r of R: their ascending ``number``, int64 ``[rows]``, out of a ``total``.
    """
    if number is None:
        number = np.arange(len(work))
        total = len(work)
    device = np.zeros(len(work), np.int64)
    minibatch = number * minibatches // max(total, 1)
    edges = np.searchsorted(minibatch, np.arange(minibatches + 1))
    for start, end in pairwise(edges):
        device[start:end] = spread(work[start:end], devices)
    order = np.argsort(device, kind="stable")
    counts = np.bincount(device, minlength=devices)
    return np.split(order, np.cumsum(counts)[:-1])


def spread(work: Any, devices: int) -> Any:
    """Return a device for each row, int64 ``[rows]``, such that the largest sum of ``work`` is small.

    The rows with most work come first, each to the device that has least (LPT, Graham, 1969); then devices
    swap rows. It depends on nothing but the numbers.

    Example:
        >>> spread(np.array([8, 7, 6, 5, 4]), 2).tolist()
        [1, 1, 0, 0, 0]
    """
    order = np.argsort(-work, kind="stable")
    heap = list(range(devices))  # one integer per device: its work times ``devices``, plus its number
    chosen: list[int] = []
    for weight in (work[order] * devices).tolist():
        chosen.append(heap[0] % devices)
        heapq.heapreplace(heap, heap[0] + weight)
    device = np.empty(len(work), np.int64)
    device[order] = chosen
    return _swapped(work, device, devices)


def _swapped(work: Any, device: Any, devices: int) -> Any:
    """Pair busy devices with idle ones, differently each round; swap or move a row if that evens a pair."""
    order = np.argsort(device, kind="stable")
    counts = np.bincount(device, minlength=devices)
    width = int(counts.max()) + 1  # at least one empty place per device: row number -1, of no work
    if devices < 2 or devices * width**2 > MOST_PAIRS:
        return device
    rows_of = np.full((devices, width), -1)
    rows_of[device[order], np.arange(len(work)) - np.repeat(np.cumsum(counts) - counts, counts)] = order
    weights = np.append(work, 0)  # the last entry is that of row -1
    pair = np.arange(devices // 2)
    for swap_round in range(SWAP_ROUNDS):
        loads = weights[rows_of].sum(1)
        ranked = np.argsort(loads, kind="stable")
        light = np.roll(ranked[: len(pair)], -swap_round)
        heavy = ranked[::-1][: len(pair)]
        gap = loads[heavy] - loads[light]
        # how much work each exchange of two rows moves; the best halves the gap
        moved_by = weights[rows_of[heavy]][:, :, None] - weights[rows_of[light]][:, None, :]
        best = np.abs(2 * moved_by - gap[:, None, None]).reshape(len(pair), -1).argmin(1)
        heavy_place, light_place = np.divmod(best, width)
        moved = moved_by[pair, heavy_place, light_place]
        swaps = np.flatnonzero((moved > 0) & (moved < gap))
        from_heavy = (heavy[swaps], heavy_place[swaps])
        from_light = (light[swaps], light_place[swaps])
        rows_of[from_heavy], rows_of[from_light] = rows_of[from_light], rows_of[from_heavy]
    result = np.empty(len(weights), np.int64)
    result[rows_of] = np.arange(devices)[:, None]
    return result[:-1]


def where(layout: Layout, rows: int) -> tuple[Any, Any]:
    """Return the device of each row and its place there: two int64 arrays ``[rows]``."""
    device = np.zeros(rows, np.int64)
    place = np.zeros(rows, np.int64)
    for number, device_rows in enumerate(layout):
        device[device_rows] = number
        place[device_rows] = np.arange(len(device_rows))
    return device, place
