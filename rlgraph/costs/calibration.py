"""Calibration: per kind of work, the factor by which a run's seconds exceeded the middle of the model's.

A small YAML file: ``rlgraph report RUN --calibrate FILE`` writes it, ``rlgraph plan --calibration`` reads it:

    calibration: demo on cpu, 2026-11-20
    generate: [0.4, 0.6]          # 10th and 90th percentile of measured / predicted
    update: [1.2, 1.3]

A calibrated step takes the middle of its prediction times these. Work of a kind that the file does not name
keeps its assumed range.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import quantiles
from typing import Annotated

from pydantic import BaseModel, Field

from rlgraph.section import Positive, Section
from rlgraph.syntax.source import read
from rlgraph.syntax.validate import read_record
from rlgraph.syntax.yaml_text import flow

Factors = Annotated[list[Positive], Field(min_length=2, max_length=2)]
TICK = 1e-6  # seconds; a clock can't distinguish shorter times


class Calibration(BaseModel):
    """Factors on seconds, low and high, per kind of work: one for each formula of the cost model."""

    model_config = Section.model_config

    calibration: str = Field(min_length=1, description="what they were measured on, for the plan to say.")
    generate: Factors | None = Field(default=None, description="prefill and decoding.")
    score: Factors | None = Field(default=None, description="passes without gradients.")
    update: Factors | None = Field(default=None, description="forward, backward and the optimizer.")
    sync: Factors | None = Field(default=None, description="weights on their way to a serve engine.")
    move: Factors | None = Field(default=None, description="parts of engines, to the host and back.")
    repartition: Factors | None = Field(default=None, description="columns on their way between devices.")
    host: Factors | None = Field(default=None, description="ops on the CPU, and rows repeated or selected.")
    round: Factors | None = Field(
        default=None, description="from one round of a region that streams to the next, its pool idle."
    )

    def of(self, kind: str) -> tuple[float, float] | None:
        """Return the factors of a kind of work, low and high, or None if it was not measured."""
        factors: list[float] | None = getattr(self, kind)
        return (min(factors), max(factors)) if factors else None


RATES = tuple(name for name in Calibration.model_fields if name != "calibration")


def load_calibration(path: str) -> Calibration:
    """Return the calibration that a YAML file holds.

    Raises:
        GraphError: the file can't be read, or is wrong; the error lists every problem.
    """
    return read_record(Calibration, read(Path(path)), "calibration")


def fit(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and 90th percentile of measured over predicted seconds, linear between neighbours.

    Example:
        >>> fit([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), fit([2.5])
        ((2.0, 10.0), (2.5, 2.5))
    """
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    tenths = quantiles(ratios, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def calibration_text(name: str, notes: Sequence[str], ratios: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Return a calibration as YAML, with notes as comments.

    ``ratios``: kind of work -> step -> measured over predicted seconds, of each iteration.
    """
    lines = [*(f"# {note}" for note in notes), f"calibration: {flow(name)}"]
    for kind in RATES:
        ratios_of_step = ratios.get(kind)
        if ratios_of_step:
            low, high = fit([*chain.from_iterable(ratios_of_step.values())])
            lines.append(f"{kind}: [{low:.4g}, {high:.4g}]  # {', '.join(ratios_of_step)}")
    return "\n".join(lines) + "\n"
