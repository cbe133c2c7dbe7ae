"""Whether a metric has come so far that a run may end before its last iteration (``schedule.stop``)."""

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
        if (stop := self.stop) is None or (value := values.get(stop.metric)) is None or value != value:
            return
        high = stop.at_least is not None
        bound: Any = stop.at_least if high else stop.at_most
        self.count = self.count + 1 if (value >= bound if high else value <= bound) else 0
        if self.count >= stop.times and not self.reached:
            side = f"{'at least' if high else 'at most'} {bound:g}"
            row = f", {stop.times} times in a row" if stop.times > 1 else ""
            where = f"`{stop.metric}` is {value:.4g} after iteration {values['step']}"
            self.reached = f"{where}, {side}{row} (schedule.stop)"

    def missing(self, values: Mapping[str, Any]) -> str:
        """Return what to say where an iteration's line has no such metric."""
        if self.stop is None or self.stop.metric in values or self.stop.metric.startswith("eval/"):
            return ""
        law = f"schedule.stop waits for `{self.stop.metric}`, which this iteration did not measure"
        return "; ".join(filter(None, [law, nearest(self.stop.metric, values)]))
