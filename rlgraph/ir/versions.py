"""Counts the versions of models that a plan makes per iteration; iterations count from 1."""

from __future__ import annotations

from collections import Counter

from rlgraph.ir.intervals import due
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.weights import Version


def updates(plan: Plan, model: str) -> list[Step]:
    """Return the training steps that write a next version of a model, one after the other."""
    return [step for step in plan.steps if step.updated == model]


def made(plan: Plan, iteration: int) -> Counter[str]:
    """Return how many versions of each model an iteration makes."""
    return Counter(step.updated for step in plan.steps if step.updates and due(step.when, iteration))


def since_entry(plan: Plan, model: str, version: Version, iteration: int) -> int:
    """Return how many versions ``v+2`` is after the one on entry to an iteration: updates may be left out."""
    first = updates(plan, model)[: version.offset]
    return sum(due(step.when, iteration) for step in first)
