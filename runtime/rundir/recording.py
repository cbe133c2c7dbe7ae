"""Records the columns of some iterations in the run's directory: to train from, and to replay.

With ``schedule.record_every: k`` these are iterations 1, 1 + k, 1 + 2k, and so on: those that follow the
checkpoints of ``save_every: k``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlgraph.ir.plan import Plan
from rlgraph.nodes.support.record_file import About

if TYPE_CHECKING:
    from rlgraph.runtime.driver.iteration import Walk


def is_recorded(every: int, iteration: int) -> bool:
    """Return whether the columns of an iteration, counted from 1, are kept.

    Example:
        >>> [iteration for iteration in range(1, 9) if is_recorded(3, iteration)]
        [1, 4, 7]
    """
    return bool(every) and (iteration - 1) % every == 0


def recorded_columns(plan: Plan) -> frozenset[str]:
    """Return the columns of the graph's own nodes and those that a region hands on, without copies."""
    steps = [step for step in plan.steps if not step.facts.copies]
    return frozenset(column for step in steps for column in step.writes)


def columns_by_domain(walk: Walk) -> dict[str, list[str]]:
    """Return domain -> those of its columns that an iteration's record has."""
    found: dict[str, list[str]] = {}
    for name in sorted(recorded_columns(walk.plan) & walk.refs.keys()):
        found.setdefault(walk.columns[name].domain, []).append(name)
    return found


def about_domain(plan: Plan, domain: str, columns: Sequence[str]) -> About:
    """Return the metadata of a domain's file."""
    made = plan.domains["train"][domain]
    types = {column: plan.columns["train"][column].type for column in columns}
    return About(domain, made.parent, made.times, types)
