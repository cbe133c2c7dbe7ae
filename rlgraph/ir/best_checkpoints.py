"""Rank the checkpoints of a run by a metric of its evaluations (``schedule.best``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlgraph.syntax.settings import Best


class Ranked(NamedTuple):
    """An iteration whose checkpoint is among the best, and what its evaluation measured."""

    iteration: int
    value: float


class BestCheckpoints:
    """Ranks checkpoints by what evaluations have measured, as a run's metrics have it.

    The caller says which checkpoints there are: one that is still being written can't be the best.

    Invariants:
        - ``measured`` has the last value that an evaluation gave, by iteration, counted from 1;
        - no value in it is NaN.

    Example:
        >>> best = BestCheckpoints(Best(metric="eval/accuracy", mode="max", keep=2))
        >>> for step, value in enumerate((0.9, 0.5, 0.7, 0.7, 0.8)):
        ...     best.add({"step": step, "eval/accuracy": value})
        >>> ranking = best.among([0, 1, 2, 3])
        >>> [ranked.iteration for ranked in ranking], best.text(ranking)
        ([2, 3], '`eval/accuracy` is highest after iteration 2: 0.7 (schedule.best)')
    """

    def __init__(self, best: Best | None, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """Create it, with lines of metrics that there are already."""
        self.best = best
        self.measured: dict[int, float] = {}  # iteration -> the metric
        for values in lines:
            self.add(values)

    def add(self, values: Mapping[str, Any]) -> None:
        """Take a line of metrics; one without the metric, or in which it is not a number, counts for nothing.

        So does that of the evaluation before the first iteration, which has no checkpoint.
        """
        if self.best is None or values["step"] == 0:
            return
        value = values.get(self.best.metric)
        is_nan = value != value
        if value is not None and not is_nan:
            self.measured[values["step"]] = value

    def among(self, iterations: Iterable[int]) -> list[Ranked]:
        """Return those of some iterations that are best, as many as are to stay, the best first."""
        if self.best is None:
            return []
        sign = -1 if self.best.mode == "max" else 1
        measured = {*iterations} & self.measured.keys()
        ranking = [Ranked(iteration, self.measured[iteration]) for iteration in measured]
        ranking.sort(key=lambda ranked: (sign * ranked.value, ranked.iteration))
        return ranking[: self.best.keep]

    def text(self, ranking: Sequence[Ranked]) -> str:
        """Return which one of a ranking is best; nothing where it is empty."""
        if self.best is None or not ranking:
            return ""
        side = "highest" if self.best.mode == "max" else "lowest"
        iteration, value = ranking[0]
        return f"`{self.best.metric}` is {side} after iteration {iteration}: {value:.4g} (schedule.best)"
