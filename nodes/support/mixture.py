"""The rows of a data source that a batch takes: a function of seed and position, with nothing to save.

position   0  1  2  3  4  5  6  7        of sources with weights {a: 3, b: 1}
source     a  a  b  a  a  b  a  a        drawn a span at a time: 1000 rows, 750 of a and 250 of b
row        5  2  0  7  1  3  4  0        each source's next: its own epochs, in its own orders
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from rlgraph.nodes.support.lazy import numpy
from rlgraph.nodes.support.row_field import DataError
from rlgraph.ops.interfaces import Course
from rlgraph.records import dataclass

BLOCK = 1000  # rows of a span, where weights have no course
SPANS = 64  # whose rows are counted once, not again for each batch
GOLDEN = (5**0.5 - 1) / 2
ORDER = 2**31  # a third part of seeds, which tells draws of spans from those of epochs and sources


def pick(size: int, batch: int | Literal["all"], position: int, seed: int, shuffle: bool) -> list[int]:
    """Return rows ``[batch]`` of a set of ``size`` rows, after ``position`` rows were taken.

    Example:
        >>> pick(3, 4, 2, 0, shuffle=False)
        [2, 0, 1, 2]
    """
    if batch == "all":
        return list(range(size))
    return _through(size, range(position, position + batch), (seed,), shuffle)


@dataclass(frozen=True)
class SourceWeights:
    """The weights of several sources, and a span of rows in which they stay what they are.

    Where a weight has a course a span is the batch of an iteration, and the course is taken there.
    """

    weights: tuple[float | Course, ...]
    span: int = BLOCK

    def quotas(self, spans: Sequence[int]) -> numpy.ndarray:
        """Return int64 ``[spans, sources]``: the rows of each source, so that a span has all of its rows.

        Shares are rounded by systematic sampling: the span is cut where its sources' shares end, at
        an offset that follows the golden ratio, so that roundings cancel out over spans.
        """
        weights = numpy.empty((len(spans), len(self.weights)))
        for column, weight in zip(weights.T, self.weights, strict=True):
            if isinstance(weight, int | float):
                column[:] = weight
            else:
                column[:] = [weight.at(1 + span) for span in spans]
        ends = weights.cumsum(1)
        ends = (self.span * ends / ends[:, -1:]).round(6)
        offsets = GOLDEN * numpy.array(spans)[:, None] % 1
        quotas: numpy.ndarray = numpy.diff(numpy.ceil(ends - offsets), axis=1, prepend=0)
        return quotas.astype(numpy.int64)

    def given(self, position: int) -> numpy.ndarray:
        """Return float64 ``[sources]``: the rows of each among the first so many; within a span its share."""
        span, rest_of_span = divmod(position, self.span)
        cached_span = span - span % SPANS
        rows_before = _given_before(self, cached_span) + self.quotas(range(cached_span, span)).sum(0)
        rows: numpy.ndarray = rows_before + self.quotas([span])[0] * (rest_of_span / self.span)
        return rows


@functools.lru_cache(maxsize=8)
def _given_before(mixture: SourceWeights, span: int) -> numpy.ndarray:
    """Return int64 ``[sources]``: the rows of each before a span, a multiple of ``SPANS``."""
    total = numpy.zeros(len(mixture.weights), numpy.int64)
    for block_start in range(0, span, SPANS):
        total += mixture.quotas(range(block_start, block_start + SPANS)).sum(0)
    return total


def mixture_of(
    sources: Collection[str], weights: Mapping[str, float], courses: Mapping[str, Course], batch: int
) -> SourceWeights:
    """Return the mixture of some sources, whose weights are given up to a common factor.

    Args:
        sources: their names.
        weights: of each source.
        courses: those of some weights, as ``weights.NAME``.
        batch: the rows of an iteration, by which courses go.

    Raises:
        DataError: ``weights`` does not name the sources, or without courses one has less than a thousandth.
    """
    if weights.keys() != {*sources}:
        law = f"weights are for {', '.join(weights)}, and files has {', '.join(sources)}"
        raise DataError(f"{law}; name each source once")
    values = tuple(courses.get(f"weights.{name}", weights[name]) for name in sources)
    if any(value is not weights[name] for name, value in zip(sources, values, strict=True)):
        return SourceWeights(values, batch)
    if BLOCK * min(weights.values()) < sum(weights.values()):
        raise DataError(f"weights: a source has less than 1 row in {BLOCK}; raise its weight or leave it out")
    return SourceWeights(values)


def pick_mixed(
    sources: Mapping[str, Sequence[int]],
    mixture: SourceWeights,
    batch: int,
    position: int,
    seed: int,
    shuffle: bool,
) -> list[int]:
    """Return rows ``[batch]`` of several sources, after ``position`` rows were taken of them together.

    ``sources`` has the rows of each source. Without ``shuffle`` each goes in its own order; how sources
    alternate is drawn in any case.

    Example:
        >>> pick_mixed({"a": [0, 1], "b": [2]}, SourceWeights((1, 1)), 4, 0, 0, shuffle=False)
        [2, 0, 1, 0]
    """
    drawn = _sources_and_counts(mixture, batch, position, seed)
    rows_in_order = []  # of each source those that the batch takes of it
    for number, rows_of_source in enumerate(sources.values()):
        indices = [index for source, index in drawn if source == number]
        places = _through(len(rows_of_source), indices, (seed, number), shuffle)
        rows_in_order.append(iter([int(rows_of_source[place]) for place in places]))
    return [next(rows_in_order[number]) for number, _ in drawn]


def _sources_and_counts(
    mixture: SourceWeights, batch: int, position: int, seed: int
) -> list[tuple[int, int]]:
    """Return the source of each row of a batch, and how many rows that source gave in front of it."""
    drawn = []
    end = position + batch
    first_span = position // mixture.span
    last_span = (end - 1) // mixture.span
    for span in range(first_span, last_span + 1):
        order, rows_before = _span(mixture, span, seed)
        start = span * mixture.span
        for place in range(max(position - start, 0), min(end - start, mixture.span)):
            drawn.append((int(order[place]), int(rows_before[place])))
    return drawn


@functools.lru_cache(maxsize=8)
def _span(mixture: SourceWeights, span: int, seed: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the source at each place of a span, and how many rows it gave before that place."""
    (quotas,) = mixture.quotas([span])
    allotted = mixture.given(span * mixture.span)
    order = numpy.repeat(numpy.arange(len(quotas)), quotas)
    order = numpy.random.default_rng([seed, span, ORDER]).permutation(order)
    rows_before = numpy.zeros(mixture.span, numpy.int64)
    for number, quota in enumerate(quotas):
        rows_before[order == number] = allotted[number] + numpy.arange(quota)
    return order, rows_before


def _through(size: int, indices: Iterable[int], key: tuple[int, ...], shuffle: bool) -> list[int]:
    """Return the rows at some places of endless epochs, each of all rows once."""
    places = [divmod(index, size) for index in indices]
    if not shuffle:
        return [place for _, place in places]
    return [int(_order(size, epoch, key)[place]) for epoch, place in places]


@functools.lru_cache(maxsize=8)
def _order(size: int, epoch: int, key: tuple[int, ...]) -> numpy.ndarray:
    """Return the order of an epoch's rows."""
    places = numpy.arange(size, dtype=numpy.int32)
    return numpy.random.default_rng([key[0], epoch, *key[1:]]).permutation(places)
