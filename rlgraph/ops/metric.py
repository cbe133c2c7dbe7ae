"""Metrics as records that add up: however rows are cut into devices, ranks, micro-batches and rounds.

    device 0   mean of 3 rows: count 3, total 4.5 ─┐
    device 1   mean of 1 row:  count 1, total 0.5 ─┴─ count 4, total 5.0 ── 1.25

Totals of numbers are exact, so that no cut shows in any digit; of scalars on a device they are as good as the
device adds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial, reduce
from operator import add
from typing import Any

from rlgraph.errors import RunError, nearest
from rlgraph.records import dataclass

UNIT = 1074  # a finite float64 is a whole number of 2**-1074
BINS = 512  # per power of two: what a percentile tells apart
SPREAD = ("mean", "std", "min", "max")
# what data sources record of their rows, as ``eval/rows``: counts and shares, which are not scores
OF_ROWS = ("rows", "overlong", "filtered", "equal")


def _larger(a: Any, b: Any) -> Any:
    """Return the larger of two numbers or scalars, NaN where one is; nothing waits for a device."""
    if hasattr(a, "maximum"):
        return a.maximum(b)
    has_nan = a != a or b != b
    return math.nan if has_nan else max(a, b)


def _smaller(a: Any, b: Any) -> Any:
    return -_larger(-a, -b)


def _exact(number: Any) -> Any:
    if isinstance(number, Fraction) or not math.isfinite(number):
        return number
    return Fraction(float(number))


def _in_units(value: float) -> int:
    """Return a float as a multiple of 2**-1074."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (UNIT + 1 - denominator.bit_length())


def _total(values: Sequence[float]) -> Any:
    if not all(map(math.isfinite, values)):
        return sum(values)
    return Fraction(sum(map(_in_units, values)), 2**UNIT)


def _squares(values: Sequence[float]) -> Any:
    if not all(map(math.isfinite, values)):
        return math.nan
    return Fraction(sum(_in_units(value) ** 2 for value in values), 2 ** (2 * UNIT))


def _bin(value: float) -> float:
    """Return a value rounded to 1/512 of its power of two."""
    if not math.isfinite(value):
        return math.nan
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * BINS) / BINS, exponent)


SUMMARIES: dict[str, Callable[[Sequence[float]], Any]] = {  # what a metric keeps of its rows
    "count": len,
    "total": _total,
    "squares": _squares,
    "least": lambda values: reduce(_smaller, values, math.inf),
    "most": lambda values: reduce(_larger, values, -math.inf),
    "seen": lambda values: Counter(map(_bin, values)),  # how often each bin occurs
}
MERGES: dict[str, Callable[[Any, Any], Any]] = {"least": _smaller, "most": _larger}  # of the others a sum


def _mean(count: Any, total: Any) -> float:
    return float(total / count) if count else math.nan


def _variance(count: Any, total: Any, squares: Any) -> Any:
    mean = _exact(total) / _exact(count)
    return max(_exact(squares) / _exact(count) - mean * mean, 0)  # NaN stays


def _std(count: Any, total: Any, squares: Any) -> float:
    """Return the standard deviation of all rows: with n in the denominator."""
    return math.sqrt(_variance(count, total, squares)) if count else math.nan


def _explained(count: Any, total: Any, squares: Any, error_total: Any, error_squares: Any) -> float:
    """Return 1 - Var(error) / Var(target); NaN where targets are alike, as far as a float tells."""
    if not count:
        return math.nan
    variance = _variance(count, total, squares)
    targets_differ = variance > 1e-12 * float(squares / count)
    if not targets_differ:
        return math.nan
    return float(1 - _variance(count, error_total, error_squares) / variance)


KINDS: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "mean": (("count", "total"), _mean),
    "share": (("count", "total"), _mean),  # of rows for which something holds
    "sum": (("total",), float),
    "min": (("least",), float),
    "max": (("most",), float),
    "std": (("count", "total", "squares"), _std),
}
ERROR = ("count", "total", "squares", "error_total", "error_squares")
PERCENTILE = re.compile(r"p([1-9]\d?)")


def _percentile(share: int, bins: Counter[float]) -> float:
    """Return the smallest value that as many percent of the rows don't exceed."""
    if any(map(math.isnan, bins)):
        return math.nan
    rows_below = math.ceil(bins.total() * share / 100)
    for value in sorted(bins):
        rows_below -= bins[value]
        if rows_below <= 0:
            return value
    return math.nan


def _parts_and_formula(kind: str) -> tuple[tuple[str, ...], Callable[..., float]]:
    """Return the parts of a kind, and the function that computes its number from them."""
    if kind == "explained":
        return ERROR, _explained
    percentile = PERCENTILE.fullmatch(kind)
    if percentile:
        return ("seen",), partial(_percentile, int(percentile[1]))
    return KINDS[kind]


@dataclass(frozen=True)
class Metric:
    """Some rows' part of a metric; two parts of it add up with ``+``.

    Attributes:
        kind: mean, share, sum, min, max, std (with n in the denominator), explained (1 - Var(error) /
            Var(target)), or a percentile: p1 to p99, to within 0.2 % of the value.
        over: what one row is: prompts, samples, segments, tokens, optimizer steps, iterations.
        parts: what it needs of its rows, as ``SUMMARIES`` has them: numbers, or scalars on a device.

    Example:
        >>> rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
        >>> near, far = (Metric.of("std", part, "samples") for part in (rewards[:2], rewards[2:]))
        >>> (near + far).value == Metric.of("std", rewards, "samples").value
        True
    """

    kind: str
    over: str
    parts: Mapping[str, Any]

    @classmethod
    def of(cls, kind: str, values: Sequence[float], over: str, count: float | None = None) -> Metric:
        """Return the metric of rows' values, or of their sum alone where ``count`` says how many they are.

        Raises:
            RunError: there is no such kind, or it is not one of these values.
        """
        if kind not in KINDS and not PERCENTILE.fullmatch(kind):
            law = f"a metric can't be `{kind}`: kinds are {', '.join(KINDS)}, and percentiles, p1 to p99"
            raise RunError(f"{law}\n  {nearest(kind, KINDS) or 'record one of these'}")
        needs, _ = _parts_and_formula(kind)
        parts = {name: SUMMARIES[name](values) for name in needs}
        if count is not None:
            if kind not in ("mean", "share"):
                law = f"a sum and its count make a mean or a share, and not a `{kind}`"
                raise RunError(f"{law}\n  record the values themselves, without count")
            parts["count"] = count
        elif kind == "share" and not {*values} <= {0, 1}:
            law = "a share is of rows for which something holds: its values are 0 and 1"
            raise RunError(f"{law}\n  record a mean: kind='mean'")
        return cls(kind, over, parts)

    def __add__(self, other: Metric) -> Metric:
        parts = {}
        for name, value in self.parts.items():
            merge = MERGES.get(name, add)
            parts[name] = merge(value, other.parts[name])
        return replace(self, parts=parts)

    def __str__(self) -> str:
        return f"a {self.kind} over {self.over}"

    @property
    def value(self) -> float:
        """Return the number: NaN where there are no rows, or a value of theirs is not finite."""
        needs, formula = _parts_and_formula(self.kind)
        number = formula(*(self.parts[name] for name in needs))
        return number if math.isfinite(number) else math.nan

    def is_like(self, other: Metric) -> bool:
        """Return whether the two are of one kind over one domain, so that they add up."""
        return (self.kind, self.over) == (other.kind, other.over)


def conflict(name: str, recorded: tuple[str, Metric], again: tuple[str, Metric]) -> RunError:
    """Return the error for a name that is two metrics, each with the node that records it."""
    node, metric = recorded
    second_node, second_metric = again
    if node == second_node:
        first_use = f"as {metric}"
        free_name = f"{name}_{second_metric.kind}"
    else:
        first_use = f"`{node}` as {metric}"
        free_name = f"{second_node}/{name}"
    law = f"`{second_node}` records `{name}` as {second_metric}, and {first_use}: "
    law += "a name has one kind and domain"
    return RunError(f"{law}\n  record one of them under a name of its own, such as {free_name}")


def add_up(shares: Iterable[Mapping[str, Metric]], node: str) -> dict[str, Metric]:
    """Return the metrics of a node that its devices, ranks or rounds recorded parts of.

    Raises:
        RunError: a name is of two kinds.
    """
    merged: dict[str, Metric] = {}
    for metrics in shares:
        for name, metric in metrics.items():
            known = merged.get(name)
            if known is None:
                merged[name] = metric
            elif known.is_like(metric):
                merged[name] = known + metric
            else:
                raise conflict(name, (node, known), (node, metric))
    return merged
