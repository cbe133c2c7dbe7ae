"""A choice of settings, with its plan and prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from rlgraph.ir.plan import Plan
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

    @cached_property
    def seconds(self) -> float:
        """The middle of what is predicted for an iteration; infinity without a plan."""
        return middle(self.plan.predicted.seconds) if self.plan and self.plan.predicted else math.inf

    @property
    def devices(self) -> int:
        """The devices of all pools together."""
        return sum(self.plan.pools.values()) if self.plan else 0

    @property
    def fits(self) -> bool:
        """Whether no device holds more than it can."""
        peaks = (self.plan.peak or {}).values() if self.plan else ()
        return bool(peaks) and all(peak.fits for peak in peaks)

    @property
    def lacks(self) -> float:
        """The bytes that the fullest device is short of; infinity without a plan."""
        peaks = (self.plan.peak or {}).values() if self.plan else ()
        return max((float(peak.lacks) for peak in peaks), default=math.inf)

    @property
    def family(self) -> str:
        """How the layout divides the devices, in words."""
        return self.layout.family if self.layout else "as the graph says"

    @property
    def why_not(self) -> str:
        """Why it is not chosen whatever its speed: it is refused or does not fit; else nothing."""
        if self.plan is None or self.fits:
            return self.refusal
        pool, peak = max((self.plan.peak or {}).items(), key=lambda item: item[1].lacks)
        return f"{pool} needs {size_text(peak.bytes)} of {size_text(peak.capacity)} in `{peak.step}`"


@dataclass(frozen=True)
class Remedy:
    """A change with which a plan fits. ``devices``: on so many in all; None: on those that it has."""

    candidate: Candidate
    devices: int | None = None
