"""The memory and time that a plan predicts on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peak:
    """The most that a device of a pool holds, in which step, and what it is made of. Bytes.

    ``host`` is what its train engines keep in host memory all the time, beside what comes and goes.
    """

    bytes: int
    capacity: int
    step: str
    parts: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Return whether the device has as much."""
        return self.bytes <= self.capacity


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
