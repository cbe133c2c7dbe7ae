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
from dataclasses import dataclass, field, fields
from itertools import count, takewhile
from typing import Any

from rlgraph.ir.plan import Plan, Step
from rlgraph.planning.simulate import slot_steps
from rlgraph.runtime.driver.adaptive import controls_after
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.region import RunningRegion
from rlgraph.runtime.driver.row_buffer import Waiting
from rlgraph.runtime.driver.states import states_after


@dataclass
class State:
    """The memory of a run from one iteration to the next, beside weights and optimizers."""

    iteration: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)  # rows that each data source has given
    waiting: dict[str, Waiting] = field(default_factory=dict)  # what each region has left over
    controls: dict[str, float] = field(default_factory=dict)  # adaptive numbers of the next iteration
    states: dict[str, str] = field(default_factory=dict)  # of each node that keeps one, its state as JSON
    seconds: float = 0.0  # that the run has taken until then, without what was lost and between its starts
    due: Sequence[str] = ()  # what had an interval that ended with the iteration

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it; the columns of what waits are files of their own."""
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "waiting"}
        buffers = {name: waiting.parts().items() for name, waiting in self.waiting.items()}
        records = {
            name: {kind: buffered.record() for kind, buffered in each} for name, each in buffers.items()
        }
        return {**kept, "waiting": records}


def stretch(
    plan: Plan,
    driver: Driver,
    state: State,
    end: int,
    stop: Callable[[], bool],
    keep: Callable[[int], frozenset[str]],
) -> Iterator[Execution]:
    """Run the iterations from ``state.iteration`` up to ``end``, and yield each when it is complete.

    Args:
        plan: what to run; its ``slot`` says in which order.
        driver: what carries it out.
        state: brought up to each iteration before that is given.
        end: the number of iterations after which the stretch ends.
        stop: once it says so, no further iteration is begun.
        keep: from an iteration, counted from 0, the columns that outlive their last reader.

    Raises:
        StepError: a step failed, or took longer than ``schedule.timeout``.
        LostError: a step failed as a worker is gone.
    """
    ahead = lead(plan)
    _open(plan, driver, state)
    start, first = Entry(state.iteration, dict(state.versions)), state.iteration
    executions: dict[int, Execution] = {}
    early: list[tuple[int, Step]] = []  # submitted with the slot before
    for now in count(first - ahead):
        if stop():
            end = min(end, max(first, now + ahead))  # what has begun
        if now >= end:
            return
        for iteration in range(max(first, now), min(end, now + ahead + 2)):
            if iteration not in executions:
                entry = _entry(plan, start, iteration)
                before = executions.get(iteration - 1)
                past = state.positions, before, keep(iteration), state.controls, state.states
                executions[iteration] = Execution(plan, "train", entry, *past)
        steps = [entry for entry in slot_steps(plan, now, first, end) if entry not in early]
        early = [*takewhile(_is_source, slot_steps(plan, now + 1, first, end))]
        mine = [(executions[iteration], step) for iteration, step in (*steps, *early)]
        driver.submit((execution, execution.as_it_runs(step)) for execution, step in mine)
        if now >= first:
            driver.finish(executions[now])
            driver.settle()  # before the weights change, and before a checkpoint has what was begun
            yield _complete(executions, now, state, driver)


def _open(plan: Plan, driver: Driver, state: State) -> None:
    """Let regions go on from what a checkpoint has."""
    for name, region in plan.regions.items():
        if name not in driver.regions:
            waiting = state.waiting.get(name, Waiting())
            position = state.positions.get(region.source, 0)
            driver.regions[name] = RunningRegion(
                plan, name, waiting, position, lambda: driver.served.versions
            )


def _is_source(entry: tuple[int, Step]) -> bool:
    """Return whether a step needs no weights and no columns: it may run while an iteration is recorded."""
    return not entry[1].inserted and not entry[1].reads and not entry[1].models


def lead(plan: Plan) -> int:
    """Return how many iterations the earliest steps run ahead."""
    return max((step.lead for step in plan.steps), default=0)


def _entry(plan: Plan, start: Entry, iteration: int) -> Entry:
    behind = max(start.iteration, iteration - plan.schedule.staleness)
    return Entry(iteration, _versions(plan, start, iteration), older=_versions(plan, start, behind))


def _versions(plan: Plan, start: Entry, iteration: int) -> dict[str, int]:
    """Return the versions on entry to an iteration after ``start``."""
    passed = range(start.iteration + 1, iteration + 1)
    new = sum((plan.new_versions(number) for number in passed), Counter[str]())
    return {model: version + new[model] for model, version in start.versions.items()}


def _complete(executions: dict[int, Execution], iteration: int, state: State, driver: Driver) -> Execution:
    """Take an iteration out of the pipeline, and note what it leaves."""
    execution = executions.pop(iteration)
    state.versions = _versions(execution.plan, execution.entry, iteration + 1)
    state.iteration = iteration + 1
    waiting = {name: region.waiting() for name, region in driver.regions.items()}
    state.waiting = {name: left for name, left in waiting.items() if left.parts()}
    state.positions = execution.positions_after()
    state.positions |= {region.plan.region.source: region.position() for region in driver.regions.values()}
    state.controls, state.states = controls_after(execution), states_after(execution)
    if follower := executions.get(iteration + 1):
        follower.follow_completed(state.positions, state.controls, state.states)
    return execution
