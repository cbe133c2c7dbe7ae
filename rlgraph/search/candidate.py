"""A choice of settings, with its plan and prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rlgraph.ir.actions import MoveEngine
from rlgraph.ir.plan import Plan
from rlgraph.ir.prediction import Peak, Prediction
from rlgraph.search.layout import PoolLayout
from rlgraph.search.moves import Settings
from rlgraph.units import middle, size_text


@dataclass(frozen=True)
class Candidate:
    """Settings and the plan that they give, or why there is none."""

    settings: Settings
    plan: Plan | None
    refusal: str = ""  # why there is no plan
    alters: str = ""  # what the settings do to results, if anything
    layout: PoolLayout | None = None  # what the settings stand for, if they are a layout of the devices

    @property
    def prediction(self) -> Prediction:
        """The prediction; only for a candidate that has a plan."""
        assert self.plan and self.plan.predicted
        return self.plan.predicted

    @property
    def peaks(self) -> Mapping[str, Peak]:
        """The most memory that a device of each pool has to hold; none without a plan."""
        if self.plan is None:
            return {}
        return self.plan.peak or {}

    @cached_property
    def seconds(self) -> float:
        """The middle of what is predicted for an iteration; infinity without a plan."""
        if self.plan is None or self.plan.predicted is None:
            return math.inf
        return middle(self.plan.predicted.seconds)

    @cached_property
    def devices(self) -> int:
        """The devices of all pools together; 0 without a plan."""
        if self.plan is None:
            return 0
        return sum(self.plan.pools.values())

    @cached_property
    def moves(self) -> int:
        """The number of times that engines leave their devices in an iteration."""
        if self.plan is None:
            return 0
        count = 0
        for step in self.plan.steps:
            if isinstance(step.action, MoveEngine) and step.action.direction == "off":
                count += 1
        return count

    @cached_property
    def fits(self) -> bool:
        """Return whether no device holds more than it can."""
        if not self.peaks:
            return False
        return all(peak.fits for peak in self.peaks.values())

    @property
    def lacks(self) -> float:
        """The bytes that the fullest device is short of; infinity without a plan."""
        if not self.peaks:
            return math.inf
        return max(float(peak.lacks) for peak in self.peaks.values())

    @property
    def family(self) -> str:
        """Return in words how the layout divides the devices."""
        if self.layout is None:
            return "as the graph says"
        return self.layout.family

    @property
    def why_not(self) -> str:
        """Return why it is not chosen whatever its speed: it is refused, or does not fit; else nothing."""
        if self.fits or not self.peaks:
            return self.refusal
        pool, peak = max(self.peaks.items(), key=lambda item: item[1].lacks)
        return f"{pool} needs {size_text(peak.bytes)} of {size_text(peak.capacity)} in `{peak.step}`"


@dataclass(frozen=True)
class Remedy:
    """A change with which a plan fits. ``devices``: on so many in all; None: on those that it has."""

    candidate: Candidate
    devices: int | None = None
