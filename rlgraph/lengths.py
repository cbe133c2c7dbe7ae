"""The distribution of response lengths, from its mean, from percentiles, or from both."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist, fmean

from rlgraph.errors import fail

POINTS = 64  # points of the grid on which a rollout's shrinking batch is summed
QUANTILES = 4096  # that stand for a distribution of which percentiles are known


@dataclass(frozen=True)
class Lengths:
    """The distribution of response lengths: exponential with this mean, cut at ``longest``.

    Of all distributions with a given mean and a bound it is the one of most entropy: it assumes nothing else.
    With ``percentiles``, as (share, tokens), it is log-normal between each and the next, and beyond the outer
    ones; with all tokens times a factor, so that the mean is right.
    """

    mean: float
    longest: float
    percentiles: tuple[tuple[float, float], ...] = ()

    @staticmethod
    def of(description: float | Mapping[str, float], limit: float) -> Lengths:
        """Return what is said of responses, as 800, or {mean: 800, p50: 500, p99: 4000}; all but two
        percentiles may be left out.

        Raises:
            GraphError: it describes no distribution.

        Example:
            >>> Lengths.of({"p50": 100, "p99": 1000}, 8000).of_longest(1000).__round__(1)
            2129.9
        """
        percentiles = dict(description) if isinstance(description, Mapping) else {"mean": description}
        mean = percentiles.pop("mean", None)
        if mean and not percentiles:
            return Lengths(min(mean, limit), limit)
        for name in percentiles:
            if not re.fullmatch(r"p[1-9]\d?", name):
                raise fail("response-tokens", f"`{name}` is not a percentile", None, ["mean", "p1 to p99"])
        points = sorted((int(name[1:]) / 100, tokens) for name, tokens in percentiles.items())
        tokens = [tokens for _, tokens in points]
        grow = tokens == sorted(tokens)
        if len(points) < 2 or not grow or min(*tokens, mean or 1) <= 0:
            law = "lengths of responses need two percentiles or more, which grow, of tokens above 0"
            raise fail("response-tokens", law, None, remedy="as --response-tokens p50=500,p99=4000")
        if not mean:
            mean = fmean(min(length, limit) for length in _quantiles(tuple(points)))
        return Lengths(min(mean, limit), limit, tuple(points))

    @property
    @lru_cache  # noqa: B019 - by value: each price of a rollout makes an equal one anew
    def rate(self) -> float:
        """Return by how much tokens are divided: for the exponential distribution the rate r for which the
        cut one has its mean, (1 - exp(-r M)) / r = mean. 0: all have ``longest``."""
        if self.mean >= self.longest:
            return 0.0
        most_tokens = max([1.0, *(tokens for _, tokens in self.percentiles)])
        low, high = 0.0, 64.0 / self.mean * most_tokens
        for _ in range(80):
            middle = (low + high) / 2
            is_too_long = self._mean(middle) > self.mean
            if is_too_long:
                low = middle
            else:
                high = middle
        return low

    def _mean(self, rate: float) -> float:
        if not self.percentiles:
            return -math.expm1(-rate * self.longest) / rate
        end = rate * self.longest
        return fmean(min(length, end) for length in _quantiles(self.percentiles)) / rate

    @cached_property
    def square(self) -> float:
        """Return the mean of the squared length."""
        rate, end = self.rate, self.longest
        if rate == 0:
            return end**2
        if self.percentiles:
            return fmean(min(length / rate, end) ** 2 for length in _quantiles(self.percentiles))
        return 2 * (1 / rate**2 - math.exp(-rate * end) * (end / rate + 1 / rate**2))

    def at(self, share: float) -> float:
        """Return the tokens that this share of responses does not exceed."""
        if self.rate == 0:
            return self.longest
        if not self.percentiles:
            return min(-math.log1p(-share) / self.rate, self.longest)
        return min(_quantile(self.percentiles, share) / self.rate, self.longest)

    def share_longer_than(self, tokens: float) -> float:
        """Return the share of responses that have more tokens."""
        if not self.percentiles:
            return math.exp(-self.rate * tokens)
        lengths = _quantiles(self.percentiles)
        return 1 - bisect_right(lengths, tokens * self.rate) / len(lengths)

    def spread(self, rows: int) -> list[float]:
        """Return the tokens of so many responses, each as likely as the others, from the shortest on.

        Example:
            >>> [round(tokens) for tokens in Lengths(100, 1000).spread(4)], Lengths(10, 10).spread(2)
            ([13, 47, 98, 208], [10, 10])
        """
        return [self.at((n + 0.5) / rows) for n in range(rows)]

    def of_longest(self, rows: float) -> float:
        """Return the tokens of the longest of ``rows`` responses: the length that one in ``rows`` exceeds."""
        return max(self.mean, self.at(1 - 1 / max(rows, 1)))

    def alive(self, rows: float) -> Iterator[tuple[float, float, float]]:
        """Yield the shrinking batch: (tokens generated so far, rows that still run, decode steps)."""
        end = self.of_longest(rows)
        for index in range(POINTS):
            middle = (index + 0.5) * end / POINTS
            unfinished = max(1.0, rows * self.share_longer_than(middle))
            yield middle, unfinished, end / POINTS

    def __str__(self) -> str:
        points = ", ".join(f"p{share * 100:.0f} {self.at(share):,.0f}" for share, _ in self.percentiles)
        return f"lengths {points or 'exponential'} up to {self.longest:,.0f}"


def _quantile(percentiles: Sequence[tuple[float, float]], share: float) -> float:
    """Return a quantile of a distribution: log-normal, so that the logarithm of tokens is a straight line
    over standard deviations, between two percentiles and beyond the outer ones.

    Example:
        >>> [round(_quantile([(0.5, 10), (0.9, 100)], share)) for share in (0.1, 0.5, 0.7, 0.9)]
        [1, 10, 26, 100]
    """
    if share <= 0:
        return 0.0
    index = bisect_right([known for known, _ in percentiles], share)
    index = min(max(index, 1), len(percentiles) - 1)  # beyond the outer ones their line goes on
    (low, least), (high, most) = percentiles[index - 1 : index + 1]
    start, z, end = map(NormalDist().inv_cdf, (low, share, high))
    return float(least * (most / least) ** ((z - start) / (end - start)))


@lru_cache
def _quantiles(percentiles: tuple[tuple[float, float], ...]) -> list[float]:
    """Return equally likely lengths, from the shortest on."""
    return [_quantile(percentiles, (n + 0.5) / QUANTILES) for n in range(QUANTILES)]
