"""Calibration: for each kind of work, by which factor a run's seconds exceeded the middle of the model's.

A small YAML file: ``rlgraph report RUN --calibrate FILE`` writes it, ``rlgraph plan --calibration`` reads it:

    calibration: demo on cpu, 2026-11-20
    generate: [0.4, 0.6]          # 10th and 90th percentile of measured / predicted
    update: [1.2, 1.3]

A calibrated step takes the middle of its prediction times these. Work of a kind that the file does not name
keeps its assumed range.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Annotated

from pydantic import BaseModel, Field

from rlgraph.errors import GraphError
from rlgraph.plan import MOVES, Step
from rlgraph.sections import Positive, Section
from rlgraph.source import read
from rlgraph.validate import Binder, validate

Factors = Annotated[list[Positive], Field(min_length=2, max_length=2)]
TICK = 1e-6  # seconds: what a clock tells apart


class Calibration(BaseModel):
    """Factors on seconds, low and high, by the kind of work: one for each formula of the cost model."""

    model_config = Section.model_config

    calibration: str = Field(min_length=1, description="what they were measured on, for the plan to say.")
    generate: Factors | None = Field(default=None, description="prefill and decoding.")
    score: Factors | None = Field(default=None, description="passes without gradients.")
    update: Factors | None = Field(default=None, description="forward, backward and the optimizer.")
    sync: Factors | None = Field(default=None, description="weights on their way to a serve engine.")
    move: Factors | None = Field(
        default=None, description="parts of engines on their way to the host and back."
    )
    repartition: Factors | None = Field(default=None, description="columns on their way between devices.")
    host: Factors | None = Field(
        default=None, description="ops that run on the CPU, and rows that are repeated or selected."
    )

    def of(self, step: Step) -> tuple[float, float] | None:
        """The factors of a step's kind of work, low and high; None: that kind was not measured."""
        found: list[float] | None = getattr(self, work_of(step))
        return (min(found), max(found)) if found else None


KINDS = tuple(name for name in Calibration.model_fields if name != "calibration")


def work_of(step: Step) -> str:
    """The kind of work that a step is: which formula predicts it.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> plan = compile_graph("grpo", devices=2)
        >>> sorted({work_of(step) for step in plan.steps})
        ['generate', 'host', 'repartition', 'score', 'sync', 'update']
    """
    if step.kind in ("sync", "repartition"):
        return step.kind
    if step.copied:
        return "sync"
    if step.kind in MOVES:
        return "move"
    if step.engine == "serve":
        return "generate"
    if step.engine == "train":
        return "update" if step.updates else "score"
    return "host"


def load_calibration(path: str) -> Calibration:
    """The calibration that a YAML file holds.

    Raises:
        GraphError: the file can't be read, or is wrong: with every problem found.
    """
    binder = Binder()
    found = validate(Calibration, read(Path(path)), "calibration", binder)
    if binder.problems or not isinstance(found, Calibration):
        raise GraphError(binder.problems)
    return found


def fit(ratios: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile of measured over predicted seconds, between neighbours linear.

    Example:
        >>> fit([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), fit([2.5])
        ((2.0, 10.0), (2.5, 2.5))
    """
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    tenths = quantiles(ratios, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def calibration_text(name: str, notes: Sequence[str], ratios: Mapping[str, Mapping[str, list[float]]]) -> str:
    """A calibration as YAML.

    Args:
        name: what it was measured on, in a few words.
        notes: lines for comments.
        ratios: kind of work -> step -> measured over predicted seconds, of each iteration.
    """
    lines = [*(f"# {note}" for note in notes), f"calibration: {json.dumps(name)}"]
    for kind in KINDS:
        if steps := ratios.get(kind):
            low, high = fit([ratio for found in steps.values() for ratio in found])
            lines.append(f"{kind}: [{low:.4g}, {high:.4g}]  # {', '.join(steps)}")
    return "\n".join(lines) + "\n"
