"""The memory and time that a plan predicts on a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from rlgraph.records import dataclass


@dataclass(frozen=True)
class Peak:
    """The most that a device of a pool holds, in which step, and what it is made of. Bytes.

    ``host`` is what its train engines keep in host memory all the time, beside what comes and goes; ``free``
    are the bytes of its capacity that nothing may take.
    """

    bytes: int
    capacity: int
    step: str
    parts: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    free: int = 0  # what stays free

    @property
    def lacks(self) -> int:
        """Return the bytes that the device has too few of; below 0 where it has enough."""
        return self.bytes + self.free - self.capacity

    @property
    def fits(self) -> bool:
        """Return whether the device has as much, and what stays free."""
        return self.lacks <= 0


@dataclass(frozen=True)
class Figure:
    """A predicted number between its lowest and its highest; ``value`` is their geometric mean."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(range: tuple[float, float]) -> Figure:
        """Return the figure of two ends, in any order."""
        low, high = sorted(range)
        numbers = [float(f"{number:.7g}") for number in (math.sqrt(low * high), low, high)]
        return Figure(*numbers)


@dataclass(frozen=True)
class Headline:
    """The figures to decide by: times, their cost, and what they are spent on. None: not known."""

    iteration: Figure  # seconds, in the steady state
    run: Figure | None  # seconds of all iterations, evaluations and checkpoints; None: nobody says how many
    device_hours: Figure | None  # of the run, on all devices
    # per second per device: prompts and responses of the samples made, or of the rows trained on
    tokens: Figure
    utilisation: Mapping[str, Figure]  # update -> model FLOPs over those that its devices could do (MFU)
    evaluation: Figure | None  # seconds of one
    checkpoint: Figure | None  # seconds of the one at the end; others are written while iterations run
    limits: Mapping[str, float]  # step -> its share of an iteration's critical path, the largest first
    left_out: tuple[str, ...]  # what the run takes beside, and why it is not known


@dataclass(frozen=True)
class StreamForecast:
    """The steady state of a region that streams, at best and at worst, and the same devices without.

    Ages are in updates, those of rows when they are used.
    """

    seconds: tuple[float, float]  # of an iteration
    drawing: tuple[float, float]  # of them, in which the pool that generates is busy with rounds
    fill: tuple[float, float]  # seconds that the first iterations take beyond as many later ones
    age: tuple[float, float]  # mean
    oldest: int
    dropped: tuple[float, float]  # the share of rows that are dropped as they would be older
    bound: int | None  # no row is older; None: there is no bound
    waiting: int  # the most rows that wait in the buffer: the least one that holds nothing up
    begun: int  # rows that may be begun and not used, at most
    synchronous: tuple[float, float]  # seconds of an iteration whose steps take turns
    # the same where generation runs as many iterations ahead; None: none
    ahead: tuple[float, float] | None


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of an iteration on a cluster: seconds at best and at worst, and what that assumes.

    Where generation overlaps training it is an iteration of the steady state.
    """

    cluster: str
    seconds: tuple[float, float]
    pools: Mapping[str, tuple[float, float]]  # seconds in which each pool is busy
    assumed: tuple[str, ...]
    in_flight: Mapping[str, tuple[int, int]]  # rollout -> samples at a time per engine, and waves of them
    calibrated: str = ""  # the run that the factors on its seconds come from
    headline: Headline | None = None
    stream: StreamForecast | None = None
