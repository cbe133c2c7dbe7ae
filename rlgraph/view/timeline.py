"""Predicts when each step of a plan runs, on which devices, and what these hold at that time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from rlgraph.costs.memory import PARTS, Footprint, away_items
from rlgraph.costs.pricing import Pricing, sizes_of
from rlgraph.errors import GraphError
from rlgraph.ir.actions import Kind, Lend, Sync
from rlgraph.ir.plan import Plan, Step
from rlgraph.planning.overlap import guess
from rlgraph.planning.predict import Scenario
from rlgraph.planning.simulate import Event, depth, period, simulate, steady
from rlgraph.units import middle
from rlgraph.version import VERSION

DeviceAddress = tuple[str, int]  # a pool, and a device's number in it
Parts = dict[str, int]  # memory of a device: part -> bytes


@dataclass(frozen=True)
class Arrow:
    """The columns or weights that one step hands to another, of the same or of another iteration."""

    source: tuple[int, int]  # the step's number, its iteration
    target: tuple[int, int]
    name: str


@dataclass(frozen=True)
class Lane:
    """Consecutive devices of a pool that always run the same steps; ``first`` and ``last`` are included."""

    pool: str
    first: int
    last: int
    steps: frozenset[int]
    beside: bool  # it is of the CPUs beside these devices


def expected(plan: Plan) -> tuple[list[Event], float]:
    """Return the events of some iterations, from an empty pipeline to an empty one, and one's seconds.

    Every step is shown in each iteration, also in those that leave it out. It takes the middle of its
    predicted seconds; without a prediction, a rough relative guess.
    """
    seconds = {step.id: _seconds(step) for step in plan.steps}
    if plan.predicted and plan.predicted.stream:
        iteration_seconds = middle(plan.predicted.stream.seconds)
        return [*_streamed(plan, seconds, iteration_seconds, ahead(plan))], iteration_seconds
    count = 4 * (depth(plan) + 1) if depth(plan) else 3
    events = simulate(steady(plan), seconds, count)
    return events, period(events, count)


def _seconds(step: Step) -> float:
    return middle(step.seconds) if step.seconds else guess(step)


def ahead(plan: Plan) -> int:
    """Return by how many iterations generation precedes the training on most of its rows."""
    if plan.predicted and plan.predicted.stream:
        best, worst = plan.predicted.stream.age
        return round((best + worst) / 2)
    return depth(plan)


def _streamed(plan: Plan, seconds: Mapping[int, float], period: float, lead: int) -> Iterator[Event]:
    """Yield the events of a plan that streams.

    All rounds between two syncs are one event, in the iteration that trains on most of them. Training fills
    the time up to the next sync:

        gen      sync  rounds for 2   sync  rounds for 3
        train    sync     update 1    sync     update 2
    """
    syncs = [step for step in plan.steps if isinstance(step.action, Sync)]
    generation = [step for step in plan.steps if step.region and step.kind is not Kind.COLLECT]
    outside_training = {step.id for step in (*syncs, *generation)}
    training_seconds = dict(seconds)
    for number in outside_training:
        training_seconds[number] = 0.0
    training = simulate(steady(plan), training_seconds, 1)
    training_end = max(event.end for event in training)
    for iteration in range(lead + 3):
        generation_time = iteration * period
        sync_time = training_start = (iteration + lead) * period
        for step in syncs:
            yield Event(step, iteration, sync_time, sync_time + seconds[step.id])
            sync_time += seconds[step.id]
            if not isinstance(step.action, Lend):
                generation_time += seconds[step.id]
        for step in generation:
            yield Event(step, iteration, generation_time, generation_time + seconds[step.id])
            if not step.on_host:
                generation_time += seconds[step.id]
        shift = training_start + period - training_end
        for event in training:
            if event.step.id not in outside_training:
                yield Event(event.step, iteration, event.start + shift, event.end + shift)


def places(plan: Plan, step: Step) -> Iterator[DeviceAddress]:
    """Yield the devices that are busy with a step; those of a sync between pools on both sides."""
    for device in step.devices:
        yield step.pool, device
    if step.source:
        for device in range(plan.pools[step.source]):
            yield step.source, device


def lanes(plan: Plan) -> list[Lane]:
    """Return the devices of all pools, and what runs beside them; neighbours that do the same share a lane.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> [(lane.first, lane.last) for lane in lanes(compile_graph("grpo", devices=8))]
        [(0, 0), (1, 7), (0, 7)]
    """
    on_devices: dict[DeviceAddress, set[int]] = defaultdict(set)
    on_hosts: dict[DeviceAddress, set[int]] = defaultdict(set)
    for step in plan.steps:
        busy = on_hosts if step.on_host else on_devices
        for address in places(plan, step):
            busy[address].add(step.id)
    lanes: list[Lane] = []
    for pool, count in plan.pools.items():
        lanes += _lanes_of_pool(pool, [on_devices[pool, device] for device in range(count)], beside=False)
        host_lanes = _lanes_of_pool(pool, [on_hosts[pool, device] for device in range(count)], beside=True)
        lanes += [lane for lane in host_lanes if lane.steps]
    return lanes


def _lanes_of_pool(pool: str, steps_of_devices: Sequence[set[int]], beside: bool) -> Iterator[Lane]:
    """Yield runs of neighbouring devices that have the same steps."""
    start = 0
    for steps, neighbours in groupby(steps_of_devices):
        end = start + len(list(neighbours))
        yield Lane(pool, start, end - 1, frozenset(steps), beside)
        start = end


def arrows(plan: Plan, iterations: int) -> list[Arrow]:
    """Return what steps hand to each other in some iterations: columns and weights."""
    arrows: list[Arrow] = []
    for iteration, step in product(range(iterations), plan.steps):
        for number in step.after:
            name = _handed_over(plan.steps[number - 1], step)
            if name:
                arrows.append(Arrow((number, iteration), (step.id, iteration), name))
        arrows += _weights_from_before(plan, step, iteration)
    return arrows


def _handed_over(source: Step, target: Step) -> str:
    """Return the columns or the weights that one step hands to another; empty if the other only waits."""
    if source.joins == target.node:
        return "its loss"
    columns = [column for column in target.reads if column in source.writes]
    if columns:
        return ", ".join(columns)
    writes_weights = source.updated or isinstance(source.action, Sync)
    if not writes_weights:
        return ""
    models = []
    for name, version in target.models.items():
        if version and name in source.models:
            models.append(f"{name}@{version}")
    return ", ".join(models)


def _weights_from_before(plan: Plan, step: Step, iteration: int) -> Iterator[Arrow]:
    """Yield the arrows to a sync from the update of an earlier iteration whose weights it hands over."""
    if not isinstance(step.action, Sync):
        return
    for model, version in step.models.items():
        updates = plan.updates(model)
        if not updates or version is None or version.offset > 0:
            continue
        earlier = iteration - 1 + version.offset
        if earlier >= 0:
            yield Arrow((updates[-1].id, earlier), (step.id, iteration), f"{model}@{version}")


def footprint(plan: Plan) -> Pricing | None:
    """Return the memory and prices of the steps on the plan's cluster; None if they can't be known here."""
    if plan.origin is None or plan.origin.target is None or plan.predicted is None:
        return None
    if plan.origin.rlgraph != VERSION:
        return None  # another version may price otherwise than the plan says
    try:
        scenario = Scenario.of(plan.origin.target)
        sizes = sizes_of(plan)
    except GraphError:
        return None  # a saved plan may be looked at where the files that it was made with are missing
    if scenario.cluster.cluster != plan.predicted.cluster:
        return None
    return Pricing(plan, scenario.cluster, scenario.work(plan), sizes, scenario.calibration)


def memory(footprint: Footprint, pool: str) -> dict[int, Parts]:
    """Return step -> what a device of a pool holds during it, part by part; 0: between iterations."""
    moments = {step.id: sizes for step, sizes in footprint.moments(pool, footprint.in_order())}
    moments[0] = footprint.resident(pool, set(away_items(footprint.plan, pool)))
    return {number: _in_order_of_parts(sizes) for number, sizes in moments.items()}


def _in_order_of_parts(sizes: Mapping[str, int]) -> Parts:
    return {part: sizes[part] for part in PARTS if sizes[part]}
