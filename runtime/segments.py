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
    """The memory of a run from one iteration to the next, without weights and optimizers."""

    iteration: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)  # rows that each data source has given
    waiting: dict[str, Waiting] = field(default_factory=dict)  # what each region has left over
    controls: dict[str, float] = field(default_factory=dict)  # adaptive numbers of the next iteration
    states: dict[str, str] = field(default_factory=dict)  # of each node that keeps one, its state as JSON
    seconds: float = 0.0  # that the run has taken, without iterations that were lost and time between starts
    due: Sequence[str] = ()  # what had an interval that ended with the iteration

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it; the columns of what waits are files of their own."""
        record = {each.name: getattr(self, each.name) for each in fields(self)}
        record["waiting"] = {
            region: {kind: buffered.record() for kind, buffered in waiting.non_empty().items()}
            for region, waiting in self.waiting.items()
        }
        return record


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
        state: that before the stretch; it is brought up to the end of each iteration before that is yielded.
        end: the number of iterations after which the stretch ends.
        stop: returns whether no further iteration may begin.
        keep: from an iteration, counted from 0, the columns that outlive their last reader.

    Raises:
        StepError: a step failed, or took longer than ``schedule.timeout``.
        LostError: a step failed as a worker is gone.
    """
    ahead = lead(plan)
    _open(plan, driver, state)
    start = Entry(state.iteration, dict(state.versions))
    executions: dict[int, Execution] = {}  # iteration -> one that is in flight
    submitted_early: list[tuple[int, Step]] = []  # with the slot before
    for slot in count(start.iteration - ahead):
        if stop():  # what is in flight ends, and nothing begins
            in_flight_until = max(start.iteration, slot + ahead)
            end = min(end, in_flight_until)
        if slot >= end:
            return

        # 1. Open the iterations that have steps in this slot, or sources in the next.
        opened_until = min(end, slot + ahead + 2)
        for iteration in range(max(start.iteration, slot), opened_until):
            if iteration not in executions:
                executions[iteration] = Execution(
                    plan,
                    "train",
                    _entry(plan, start, iteration),
                    state.positions,
                    previous=executions.get(iteration - 1),
                    keep=keep(iteration),
                    controls=state.controls,
                    states=state.states,
                )

        # 2. Submit the slot's steps, and the sources of the next: they run while an iteration is recorded.
        steps = [item for item in slot_steps(plan, slot, start.iteration, end) if item not in submitted_early]
        next_steps = slot_steps(plan, slot + 1, start.iteration, end)
        submitted_early = list(takewhile(_is_source, next_steps))
        submissions = []
        for iteration, step in (*steps, *submitted_early):
            execution = executions[iteration]
            submissions.append((execution, execution.as_it_runs(step)))
        driver.submit(submissions)

        # 3. Wait for the iteration that ends with this slot, if the pipeline is full.
        if slot >= start.iteration:
            driver.finish(executions[slot])
            driver.settle()  # before the weights change, and before a checkpoint has what was begun
            yield _complete(executions, slot, state, driver)


def _open(plan: Plan, driver: Driver, state: State) -> None:
    """Let regions go on from what a checkpoint has."""
    for name, region in plan.regions.items():
        if name not in driver.regions:
            waiting = state.waiting.get(name, Waiting())
            position = state.positions.get(region.source, 0)
            driver.regions[name] = RunningRegion(
                plan, name, waiting, position, lambda: driver.served.versions
            )


def _is_source(item: tuple[int, Step]) -> bool:
    """Return whether a step needs no weights and no columns: it may run while an iteration is recorded."""
    _, step = item
    return not step.inserted and not step.reads and not step.models


def lead(plan: Plan) -> int:
    """Return how many iterations the earliest steps run ahead."""
    return max((step.lead for step in plan.steps), default=0)


def _entry(plan: Plan, start: Entry, iteration: int) -> Entry:
    """Return the start of an iteration of a stretch that began at ``start``."""
    oldest = max(start.iteration, iteration - plan.schedule.ahead)
    return Entry(iteration, _versions(plan, start, iteration), older=_versions(plan, start, oldest))


def _versions(plan: Plan, start: Entry, iteration: int) -> dict[str, int]:
    """Return the versions on entry to an iteration after ``start``."""
    new_versions = Counter[str]()
    for number in range(start.iteration + 1, iteration + 1):
        new_versions += plan.new_versions(number)
    return {model: version + new_versions[model] for model, version in start.versions.items()}


def _complete(executions: dict[int, Execution], iteration: int, state: State, driver: Driver) -> Execution:
    """Take an iteration out of the pipeline, and bring ``state`` up to its end."""
    execution = executions.pop(iteration)
    state.versions = _versions(execution.plan, execution.entry, iteration + 1)
    state.iteration = iteration + 1
    state.positions = execution.positions_after()
    state.waiting = {}
    for name, region in driver.regions.items():
        state.positions[region.plan.region.source] = region.position()
        waiting = region.waiting()
        if waiting.non_empty():
            state.waiting[name] = waiting
    state.controls = controls_after(execution)
    state.states = states_after(execution)
    follower = executions.get(iteration + 1)
    if follower:
        follower.follow_completed(state.positions, state.controls, state.states)
    return execution
