"""The rows of a data source that a batch takes: a function of seed and position, with nothing to save.

position   0  1  2  3  4  5  6  7        of sources with weights {a: 3, b: 1}
source     a  a  b  a  a  b  a  a        drawn a block of 1000 at a time, 750 of a and 250 of b
row        5  2  0  7  1  3  4  0        each source's next: its own epochs, in its own orders
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from rlgraph.nodes.support.data_file import DataError
from rlgraph.nodes.support.lazy import numpy

BLOCK = 1000  # rows in which each source has its share exactly
ORDER = 2**31  # a third part of seeds, which tells draws of blocks from those of epochs and sources


def pick(size: int, batch: int | Literal["all"], position: int, seed: int, shuffle: bool) -> list[int]:
    """Return rows ``[batch]`` of a set of ``size`` rows, after ``position`` rows were taken.

    Example:
        >>> pick(3, 4, 2, 0, shuffle=False)
        [2, 0, 1, 2]
    """
    if batch == "all":
        return list(range(size))
    return _through(size, range(position, position + batch), (seed,), shuffle)


def pick_mixed(
    sources: Mapping[str, Sequence[int]],
    weights: Mapping[str, float],
    batch: int,
    position: int,
    seed: int,
    shuffle: bool,
) -> list[int]:
    """Return rows ``[batch]`` of several sources, after ``position`` rows were taken of them together.

    ``sources`` has the rows of each source, and ``weights`` its share of a batch, up to a common
    factor. Without ``shuffle`` each source goes in its own order; how sources alternate is drawn in any case.

    Raises:
        DataError: ``weights`` does not name the sources, or one has less than a thousandth.

    Example:
        >>> pick_mixed({"a": [0, 1], "b": [2]}, {"a": 1, "b": 1}, 4, 0, 0, shuffle=False)
        [2, 0, 1, 0]
    """
    names = [*sources]
    if weights.keys() != set(names):
        law = f"weights are for {', '.join(weights)}, and files has {', '.join(names)}"
        raise DataError(f"{law}; name each source once")
    quotas = shares([weights[name] for name in names])
    taken = _taken(tuple(quotas), batch, position, seed)
    places = [
        iter(_through(len(own), [index for n, index in taken if n == number], (seed, number), shuffle))
        for number, own in enumerate(sources.values())
    ]
    return [int(sources[names[number]][next(places[number])]) for number, _ in taken]


def shares(weights: Sequence[float]) -> list[int]:
    """Return the rows of each source in a block, by largest remainder.

    Raises:
        DataError: a source would have none.

    Example:
        >>> shares([2, 1])
        [667, 333]
    """
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])
    for number in by_remainder[: BLOCK - sum(quotas)]:
        quotas[number] += 1
    if 0 in quotas:
        raise DataError(f"weights: a source has less than 1 row in {BLOCK}; raise its weight or leave it out")
    return quotas


def _taken(quotas: tuple[int, ...], batch: int, position: int, seed: int) -> list[tuple[int, int]]:
    """Return the source of each row of a batch, and how many rows that source gave before."""
    taken = []
    for block in range(position // BLOCK, (position + batch - 1) // BLOCK + 1):
        order, before = _block(quotas, block, seed)
        start = block * BLOCK
        for place in range(max(position - start, 0), min(position + batch - start, BLOCK)):
            number = int(order[place])
            taken.append((number, block * quotas[number] + int(before[place])))
    return taken


@functools.lru_cache(maxsize=8)
def _block(quotas: tuple[int, ...], block: int, seed: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the source at each place of a block, and how often it stands before that place."""
    order = numpy.repeat(numpy.arange(len(quotas)), quotas)
    order = numpy.random.default_rng([seed, block, ORDER]).permutation(order)
    before = numpy.zeros(BLOCK, numpy.int64)
    for number in range(len(quotas)):
        before[order == number] = numpy.arange(quotas[number])
    return order, before


def _through(size: int, indices: Iterable[int], key: tuple[int, ...], shuffle: bool) -> list[int]:
    """Return the rows at some places of endless epochs, each of all rows once."""
    places = [divmod(index, size) for index in indices]
    if not shuffle:
        return [place for _, place in places]
    return [int(_order(size, epoch, key)[place]) for epoch, place in places]


@functools.lru_cache(maxsize=8)
def _order(size: int, epoch: int, key: tuple[int, ...]) -> numpy.ndarray:
    """Return the order of an epoch's rows."""
    return numpy.random.default_rng([key[0], epoch, *key[1:]]).permutation(size)
