"""How many versions of its models a plan makes in which iteration; iterations count from 1."""

from __future__ import annotations

from collections import Counter

from rlgraph.cadence import due
from rlgraph.plan import Plan, Step


def updates(plan: Plan, model: str) -> list[Step]:
    """The training steps that write a next version of a model, one after the other."""
    return [step for step in plan.steps if step.updated == model]


def made(plan: Plan, iteration: int) -> Counter[str]:
    """How many versions of each model an iteration makes."""
    return Counter(step.updated for step in plan.steps if step.updates and due(step.when, iteration))


def since_entry(plan: Plan, model: str, label: str, iteration: int) -> int:
    """How many versions after the one on entry to an iteration ``v+2`` is: updates may be left out."""
    count = int(label.removeprefix("v") or 0)
    first = updates(plan, model)[:count] if count else []
    return sum(due(step.when, iteration) for step in first)


def is_older(label: str) -> bool:
    """Whether a step reads weights from before the iteration: ``v-1``, by generation that runs ahead."""
    return "-" in label
