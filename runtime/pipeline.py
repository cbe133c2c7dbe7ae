"""Iterations through a pipeline: with a lead of 1, generation for the next overlaps training on this one.

    slot       -1    0    1    2
    gen         0    1    2    3        each box: the iteration that the pool's steps belong to
    train            0    1    2    3

A stretch of iterations between two boundaries (an evaluation, a checkpoint, the end) fills the pipeline and
empties it, so that nothing is in flight at a boundary. Where no step leads, a slot is an iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from rlgraph.plan import Plan
from rlgraph.runtime.driver import Driver
from rlgraph.runtime.walk import Entry, Walk
from rlgraph.simulate import slot_steps


@dataclass
class State:
    """What a run remembers from one iteration to the next, beside weights and optimizers."""

    iteration: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)  # rows that each data source has given


def stretch(
    plan: Plan,
    driver: Driver,
    state: State,
    end: int,
    stop: Sequence[int],
    keep: Callable[[int], frozenset[str]],
) -> Iterator[Walk]:
    """Run the iterations from ``state.iteration`` up to ``end``, and give each when it is complete.

    Args:
        plan: what to run; its ``slot`` says in which order.
        driver: what carries it out.
        state: brought up to each iteration before that is given.
        end: the number of iterations after which the stretch ends.
        stop: once it has an item, no further iteration is begun.
        keep: from an iteration, counted from 0, the columns that outlive their last reader.

    Raises:
        StepError: a step failed, or took longer than ``schedule.timeout``.
        LostError: a step failed as a worker is gone.
    """
    ahead = lead(plan)
    start, first = Entry(state.iteration, dict(state.versions)), state.iteration
    walks: dict[int, Walk] = {}
    for now in count(first - ahead):
        if stop:
            end = min(end, max(first, now + ahead))  # what has begun
        if now >= end:
            return
        for iteration in range(max(first, now), min(end, now + ahead + 1)):
            if iteration not in walks:
                entry = _entry(plan, start, iteration)
                before = walks.get(iteration - 1)
                walks[iteration] = Walk(plan, "train", entry, state.positions, before, keep(iteration))
        driver.submit((walks[iteration], step) for iteration, step in slot_steps(plan, now, first, end))
        if now >= first:
            driver.finish(walks[now])
            yield _complete(walks, now, state)


def lead(plan: Plan) -> int:
    """How many iterations the earliest steps run ahead."""
    return max((step.lead for step in plan.steps), default=0)


def updates(plan: Plan) -> Counter[str]:
    """How many versions of each model one iteration makes."""
    return Counter(model for step in plan.steps if step.updates for model in step.models)


def _entry(plan: Plan, start: Entry, iteration: int) -> Entry:
    made, passed = updates(plan), iteration - start.iteration
    versions = {model: version + passed * made[model] for model, version in start.versions.items()}
    return Entry(iteration, versions, oldest=start.versions)


def _complete(walks: dict[int, Walk], iteration: int, state: State) -> Walk:
    """Take an iteration out of the pipeline, and note what it leaves."""
    walk = walks.pop(iteration)
    made = updates(walk.plan)
    state.iteration = iteration + 1
    state.versions = {model: version + made[model] for model, version in walk.entry.versions.items()}
    state.positions = walk.positions_after()
    if follower := walks.get(iteration + 1):
        follower.before, follower.positions = None, state.positions
    return walk
