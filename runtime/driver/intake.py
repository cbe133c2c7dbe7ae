"""The rows of a region in one iteration, and the times of an iteration of a stream."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.row_buffer import BufferedRows

GroupSpan = tuple[str, str, float, float]  # lane, name, start and end in seconds since the epoch


class StageSeconds(NamedTuple):
    """The time of a stage of a stream by how it was spent, in seconds."""

    busy: float
    starved: float  # it waited for rows
    blocked: float  # it had rows, and might not go on


class IntakeTimes(NamedTuple):
    """The times at which an iteration of a stream waited for its rows, in seconds since the epoch."""

    start: float  # when the iteration before had its rows
    request: float  # when it asked for its own
    end: float  # when it had them
    blocked_seconds: float  # in which generation might begin nothing
    buffer: StageSeconds  # busy: it had some rows; starved: none; blocked: enough


@dataclass
class Intake:
    """The rows of a region in one iteration; ``used`` is set once they are there."""

    steps: Sequence[Step]  # of its rounds
    pools: Collection[str]  # those that get nothing else until the rows are there
    used: BufferedRows | None = None
    values: dict[str, float] = field(default_factory=dict)  # metrics: see docs/metrics.md
    spans: tuple[GroupSpan, ...] = ()  # of a stream: when each group was drawn, and when it waited
    times: IntakeTimes | None = None  # of a stream

    def release(self) -> None:
        """Release the columns: all are collected."""
        assert self.used
        self.used = replace(self.used, columns={})
