"""Run a plan without devices: when each step would start and end, and whether all that it promises holds.

Follows what the driver and Ray do: steps are submitted slot by slot; a pool carries out its steps in the
order in which they were submitted; a step waits for what it reads, and with it what is behind it on its pool,
unless it runs beside the devices; the next slot is submitted when the iteration that this one ends is done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rlgraph.ir.actions import MoveEngine, Sync
from rlgraph.ir.intervals import due, share, union
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.steps import Version

BEGIN = 0.0, -1  # the first event starts at 0, after the event -1, which is none
SHORT = 1e-9  # seconds; less is rounding


class Event(NamedTuple):
    """A step of an iteration, and when it ran. Seconds since the first slot."""

    step: Step
    iteration: int
    start: float
    end: float
    waited: int = -1  # the event whose end it waited for last; -1: none


class BrokenPlanError(AssertionError):
    """A plan that would wait for ever, or whose steps would see other weights than it promises."""


def slot_steps(plan: Plan, slot: int, first: int, end: int) -> Iterator[tuple[int, Step]]:
    """Yield what a slot submits, in order: iterations, from ``first`` up to ``end``, and their steps.

    Iterations count from 0 here. Steps that an iteration leaves out (``Step.when``) are not submitted.
    Moves of engines belong to the slot, not to an iteration: they are made in each, so that every slot finds
    the same state.
    """
    for number in plan.slot:
        step = plan.steps[number - 1]
        iteration = slot + step.lead
        if isinstance(step.action, MoveEngine):
            yield min(max(iteration, first), end - 1), step
        elif first <= iteration < end and due(step.when, iteration + 1):
            yield iteration, step


def simulate(plan: Plan, seconds: Mapping[int, float], iterations: int) -> list[Event]:
    """Return the events of some iterations, in the order of submission; seconds are by a step's number.

    Raises:
        BrokenPlanError: a step waits for one that comes later, or would read other weights than promised.
    """
    run = _Run(plan, seconds, iterations)
    for slot in range(-depth(plan), iterations):
        for iteration, step in slot_steps(plan, slot, 0, iterations):
            run.submit(slot, step, iteration)
    return run.events


def occupied(step: Step) -> set[str]:
    """Return the pools whose devices do nothing else meanwhile."""
    if step.on_host:
        return set()
    return {step.pool, step.source or step.pool}


def depth(plan: Plan) -> int:
    """Return how many iterations generation runs ahead."""
    return max((step.lead for step in plan.steps), default=0)


@dataclass
class _Run:
    """The events so far.

    Invariants:

    - A step starts once its pools are free, its inputs are there and the iteration before its slot is done.
    - A pool carries out its steps in the order in which they were submitted.
    """

    plan: Plan
    seconds: Mapping[int, float]
    iterations: int
    events: list[Event] = field(default_factory=list)
    # seconds, and the number of the event that ended then: of a pool, a step and iteration, an iteration
    free: dict[str, tuple[float, int]] = field(default_factory=lambda: defaultdict(lambda: BEGIN))
    ended: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    complete: dict[int, tuple[float, int]] = field(default_factory=lambda: defaultdict(lambda: BEGIN))

    def __post_init__(self) -> None:
        self.weights = _Weights(self.plan)
        steps = self.plan.steps
        self.pools = {step.id: occupied(step) for step in steps}
        # moves of engines need no edges: a pool carries them out in their order anyway
        moves = {step.id for step in steps if isinstance(step.action, MoveEngine)}
        self.needs: dict[int, tuple[int, ...]] = {}
        for step in steps:
            self.needs[step.id] = () if step.id in moves else tuple({*step.after} - moves)

    def submit(self, slot: int, step: Step, iteration: int) -> None:
        pools = self.pools[step.id]
        ends = [self.complete[slot - 1]]
        for pool in pools:
            ends.append(self.free[pool])
        for number in self.needs[step.id]:
            need = self.plan.steps[number - 1]
            if not due(need.when, iteration + 1):
                continue  # it is left out, and nothing waits for it
            if (number, iteration) not in self.ended:
                problem = f"waits for `{need.node}`, submitted behind it"
                raise BrokenPlanError(f"`{step.node}` of iteration {iteration} {problem}")
            ends.append(self.ended[number, iteration])
        start, waited = max(ends)
        if step.models:
            self.weights.check(step, iteration)
        end = start + self.seconds[step.id]
        ended = (end, len(self.events))
        for pool in pools:
            self.free[pool] = ended
        self.ended[step.id, iteration] = ended
        self.complete[iteration] = max(self.complete[iteration], ended)
        self.events.append(Event(step, iteration, start, end, waited))


class _Weights:
    """The versions of weights as steps run, counted in updates from the start of the segment.

    Invariants:

    - ``train`` and ``serve`` hold, per model, the version that its engine has after the steps so far.
    - ``entries[i]`` holds the versions with which iteration i starts, whether or not it has begun.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.entries = [Counter[str]()]
        self.train = dict.fromkeys(plan.models, 0)
        self.serve = dict.fromkeys(plan.models, 0)

    def check(self, step: Step, iteration: int) -> None:
        """Hold a step to the versions that it is promised, and note those that it makes."""
        if isinstance(step.action, MoveEngine):
            return
        for model, version in step.models.items():
            assert version is not None, f"`{step.node}` does not say which weights it reads"
            promised = self._promised(model, version, iteration)
            engines = self.serve if step.generates else self.train
            if engines[model] != promised:
                problem = f"would read {model}@{engines[model]}, not {model}@{promised}"
                raise BrokenPlanError(f"`{step.node}` of iteration {iteration} {problem}")
            if isinstance(step.action, Sync):
                self.serve[model] = promised
            if step.updated == model:
                self.train[model] += 1

    def _promised(self, model: str, version: Version, iteration: int) -> int:
        if version.is_older:
            return self._entry(max(0, iteration - self.plan.schedule.ahead))[model]
        return self._entry(iteration)[model] + self.plan.since_entry(model, version, iteration + 1)

    def _entry(self, iteration: int) -> Counter[str]:
        while len(self.entries) <= iteration:
            self.entries.append(self.entries[-1] + self.plan.new_versions(len(self.entries)))
        return self.entries[iteration]


def steady(plan: Plan) -> Plan:
    """Return the plan with every step in every iteration: with ``weighed`` seconds, as in the long run."""
    if not any(step.when for step in plan.steps):
        return plan
    return replace(plan, steps=tuple(replace(step, when=()) for step in plan.steps))


def weighed(plan: Plan, seconds: Mapping[int, float]) -> dict[int, float]:
    """Return step -> its seconds times the part of the iterations in which it runs, or brings new weights."""
    return {step.id: seconds[step.id] * _share(plan, step) for step in plan.steps}


def _share(plan: Plan, step: Step) -> float:
    """Return the part of the iterations in which a step runs, or, for a sync, brings new weights."""
    updates: list[Step] = []
    if isinstance(step.action, Sync):
        for model in step.models:
            updates += plan.updates(model)
    if not updates:
        return share(step.when)
    # a sync has nothing to do where no update made a new version since the last
    with_new_weights = share(union(update.when for update in updates))
    return min(share(step.when), with_new_weights)


def period(events: Sequence[Event], iterations: int) -> float:
    """Return the seconds of an iteration while the pipeline is full, over the later half of a segment."""
    complete: dict[int, float] = defaultdict(float)
    for event in events:
        complete[event.iteration] = max(complete[event.iteration], event.end)
    # an iteration may differ from the next, in a pattern as long as the pipeline is deep; the last ones have
    # nothing ahead of them
    deepest = max((event.step.lead for event in events), default=0)
    cycle = 1 + deepest
    stop = iterations - cycle
    start = stop - (stop - iterations // 2) // cycle * cycle
    if stop <= start:
        return complete[iterations - 1] / iterations
    measured = (complete[stop] - complete[start]) / (stop - start)
    # a pool with slack may still be falling behind: in the long run the busiest one decides
    times = []
    for event in events:
        if event.iteration == iterations // 2:
            times.append((event.step, event.end - event.start))
    return max([measured, *_by_pool(times).values()])


def busy(plan: Plan, seconds: Mapping[int, float]) -> dict[str, float]:
    """Return pool -> seconds of its steps in an iteration, which can't be shorter than the largest."""
    idle = dict.fromkeys(plan.pools, 0.0)
    return idle | _by_pool((step, seconds[step.id]) for step in plan.steps)


def _by_pool(times: Iterable[tuple[Step, float]]) -> dict[str, float]:
    """Return pool -> the seconds of the steps that it takes part in."""
    pools: dict[str, float] = defaultdict(float)
    for step, seconds in times:
        for pool in occupied(step):
            pools[pool] += seconds
    return dict(pools)


class CriticalStep(NamedTuple):
    """A step of the critical path, and its seconds in it."""

    step: str
    seconds: float


def critical_path(plan: Plan, seconds: Mapping[int, float]) -> list[CriticalStep]:
    """Return the chain over one iteration of the steady state; its seconds add up to the iteration's.

    Those of a step, by its number, are measured or predicted. A step off the chain could take longer:

        gen      rollout ────────────╮
        train                        ╰─ update_policy     rollout, update_policy
        score            ref ──────┄┄                     off it

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> plan = compile_graph("sft", devices=1)
        >>> critical_path(plan, {step.id: 1.0 for step in plan.steps})
        [CriticalStep(step='examples', seconds=1.0), CriticalStep(step='update_policy', seconds=1.0)]
    """
    cycle = 1 + depth(plan)  # iterations that repeat together
    events = simulate(steady(plan), seconds, 4 * cycle)
    ends = [0.0] * (4 * cycle)
    for event in events:
        ends[event.iteration] = max(ends[event.iteration], event.end)
    chain = [max(events, key=lambda event: event.end)]
    while chain[-1].waited >= 0:
        chain.append(events[chain[-1].waited])
    # walked back from the last one's end, the chain settles into what each iteration repeats: one cycle of it
    window_start, window_end = ends[cycle - 1], ends[2 * cycle - 1]
    seconds_of_node: dict[str, float] = {}
    for event in reversed(chain):
        node = event.step.node
        overlap = min(event.end, window_end) - max(event.start, window_start)
        if overlap > SHORT:
            seconds_of_node[node] = seconds_of_node.get(node, 0.0) + overlap / cycle
    return [CriticalStep(node, took) for node, took in seconds_of_node.items()]
