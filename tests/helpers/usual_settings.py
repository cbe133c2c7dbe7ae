"""Settings that the planner may choose, given to a graph as they are where it has no reason to."""

from __future__ import annotations

from collections.abc import Sequence

from rlgraph.ir.chosen import CHOSEN
from rlgraph.syntax.yaml_text import flow


def usual(settings: Sequence[str], model: str = "policy") -> list[str]:
    """Return settings after the usual ones of a model, so that nothing is left to choose for it."""
    return [*(f"models.{model}.{name}={flow(value)}" for name, value in CHOSEN.items()), *settings]
