"""End a run before its last iteration, once a metric has reached a bound (``schedule.stop``)."""

import math
from collections.abc import Mapping
from typing import Any

from rlgraph.errors import nearest
from rlgraph.syntax.settings import Stop


class EarlyStop:
    """Reads a run's metrics, line by line, until they say that it may end.

    Invariants:
        - ``count`` is how many of the last lines that have the metric are within its bound, in a row;
        - ``reached``, once it is set, stays: it tells of the first time that ``count`` was enough.

    Example:
        >>> early = EarlyStop(Stop(metric="eval/accuracy", at_least=0.9, times=2))
        >>> for step, value in enumerate((0.95, 0.85, 0.9, 0.91)):
        ...     early.add({"step": step, "eval/accuracy": value})
        >>> early.reached
        '`eval/accuracy` is 0.91 after iteration 3, at least 0.9, 2 times in a row (schedule.stop)'
    """

    def __init__(self, stop: Stop | None) -> None:
        self.stop = stop
        self.count = 0
        self.reached = ""  # the reason to end; "" while there is none

    def add(self, values: Mapping[str, Any]) -> None:
        """Take a line of metrics; one in which the metric is missing or not a number counts for nothing."""
        stop = self.stop
        if stop is None:
            return
        value = values.get(stop.metric)
        if value is None or math.isnan(value):
            return
        is_met, bound = _is_met(stop, value)
        self.count = self.count + 1 if is_met else 0
        if self.reached or self.count < stop.times:
            return
        times = f", {stop.times} times in a row" if stop.times > 1 else ""
        measured = f"`{stop.metric}` is {value:.4g} after iteration {values['step']}"
        self.reached = f"{measured}, {bound}{times} (schedule.stop)"

    def missing(self, values: Mapping[str, Any]) -> str:
        """Return what to say where an iteration's line has no such metric."""
        if self.stop is None:
            return ""
        metric = self.stop.metric
        is_of_evaluation = metric.startswith("eval/")  # which not every iteration has
        if is_of_evaluation or metric in values:
            return ""
        law = f"schedule.stop waits for `{metric}`, which this iteration did not measure"
        hint = nearest(metric, values)
        return f"{law}; {hint}" if hint else law


def _is_met(stop: Stop, value: float) -> tuple[bool, str]:
    """Return whether a value is within the bound of an early stop, and the bound in words."""
    if stop.at_least is not None:
        return value >= stop.at_least, f"at least {stop.at_least:g}"
    assert stop.at_most is not None
    return value <= stop.at_most, f"at most {stop.at_most:g}"
