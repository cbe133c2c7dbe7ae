"""Whether a metric has come so far that a run may end before its last iteration (``schedule.stop``)."""

import math
from collections.abc import Mapping
from typing import Any

from rlgraph.errors import nearest
from rlgraph.syntax.settings import Stop


class EarlyStop:
    """Reads a run's metrics, line by line, until they say that it may end.

    Example:
        >>> early = EarlyStop(Stop(metric="eval/accuracy", at_least=0.9, times=2))
        >>> for step, value in enumerate((0.95, 0.85, 0.9, 0.91)):
        ...     early.add({"step": step, "eval/accuracy": value})
        >>> early.reached
        '`eval/accuracy` is 0.91 after iteration 3, at least 0.9, 2 times in a row (schedule.stop)'
    """

    def __init__(self, stop: Stop | None) -> None:
        self.stop, self.count, self.reached = stop, 0, ""

    def add(self, values: Mapping[str, Any]) -> None:
        """Take a line of metrics; one without the metric, or in which it is no number, counts for nothing."""
        stop = self.stop
        value = values.get(stop.metric) if stop else None
        if stop is None or value is None or math.isnan(value):
            return
        is_met, bound = _is_met(stop, value)
        self.count = self.count + 1 if is_met else 0
        if self.count >= stop.times and not self.reached:
            times = f", {stop.times} times in a row" if stop.times > 1 else ""
            measured = f"`{stop.metric}` is {value:.4g} after iteration {values['step']}"
            self.reached = f"{measured}, {bound}{times} (schedule.stop)"

    def missing(self, values: Mapping[str, Any]) -> str:
        """Return what to say where an iteration's line has no such metric."""
        if self.stop is None or self.stop.metric in values or self.stop.metric.startswith("eval/"):
            return ""
        law = f"schedule.stop waits for `{self.stop.metric}`, which this iteration did not measure"
        hint = nearest(self.stop.metric, values)
        return f"{law}; {hint}" if hint else law


def _is_met(stop: Stop, value: float) -> tuple[bool, str]:
    """Return whether a value is within the bound of an early stop, and the bound in words."""
    if stop.at_least is not None:
        return value >= stop.at_least, f"at least {stop.at_least:g}"
    most: Any = stop.at_most
    return value <= most, f"at most {most:g}"
