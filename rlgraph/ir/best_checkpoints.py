"""Which checkpoints of a run are best by a metric of its evaluations (``schedule.best``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlgraph.syntax.settings import Best


class Ranked(NamedTuple):
    """An iteration whose checkpoint is among the best, and what its evaluation measured."""

    iteration: int
    value: float


class BestCheckpoints:
    """Knows what evaluations have measured, from a run's metrics, and ranks checkpoints by it.

    Which checkpoints there are decides who asks: so one is best no sooner than it is whole.

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
        self.best, self.measured = best, dict[int, float]()  # iteration -> the metric
        for values in lines:
            self.add(values)

    def add(self, values: Mapping[str, Any]) -> None:
        """Take a line of metrics; one without the metric, or in which it is no number, counts for nothing.

        So does that of the evaluation before the first iteration, which has no checkpoint.
        """
        value = values.get(self.best.metric) if self.best and values["step"] else None
        if value is not None and value == value:
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
