"""The rows of a region in one iteration, and the times of an iteration of a stream."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.row_buffer import BufferedRows

GroupSpan = tuple[str, str, float, float]  # lane, name, start and end in seconds since the epoch
StageSeconds = tuple[float, float, float]  # in which a stage worked, waited for rows, was held back


class IntakeTimes(NamedTuple):
    """An iteration of a stream, up to when it has its rows. Seconds, the first three since the epoch."""

    since: float
    asked: float  # when it asked for rows
    until: float
    held: float  # in which generation might begin nothing
    buffer: StageSeconds  # in which it had too few rows, none, and enough


@dataclass
class Intake:
    """The rows of a region in one iteration; ``used`` is set once they are there."""

    steps: Sequence[Step]  # of its rounds
    pools: Collection[str]  # those that get nothing else until the rows are there
    used: BufferedRows | None = None
    values: dict[str, float] = field(default_factory=dict)  # metrics: see docs/metrics.md
    spans: tuple[GroupSpan, ...] = ()  # of a stream: when each group was drawn, and when it waited
    window: IntakeTimes | None = None  # of a stream

    def release(self) -> None:
        """Release the columns: all are collected."""
        assert self.used
        self.used = replace(self.used, columns={})
