"""Predicts when each step of a plan runs, on which devices, and what they hold then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, product

from rlgraph.costs.memory import PARTS, Footprint, away_items
from rlgraph.costs.pricing import Pricing, sizes_of
from rlgraph.errors import GraphError
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
    """Devices of a pool that do the same all the time, from the first to the last."""

    pool: str
    first: int
    last: int
    steps: frozenset[int]
    beside: bool  # it is of the CPUs beside these devices


def expected(plan: Plan) -> tuple[list[Event], float]:
    """Return the events of some iterations, from an empty pipeline to an empty one, and one's seconds.

    Every step is shown in each, those too that some iterations leave out. It takes seconds between best and
    worst where they are predicted, else a rough relative guess.
    """
    seconds = {step.id: middle(step.seconds) if step.seconds else guess(step) for step in plan.steps}
    if plan.predicted and (told := plan.predicted.stream):
        took = middle(told.seconds)
        return [*_streamed(plan, seconds, took, ahead(plan))], took
    count = 4 * (depth(plan) + 1) if depth(plan) else 3
    events = simulate(steady(plan), seconds, count)
    return events, period(events, count)


def ahead(plan: Plan) -> int:
    """Return how many iterations before it is trained on most of what generates is begun."""
    told = plan.predicted.stream if plan.predicted else None
    return round(sum(told.age) / 2) if told else depth(plan)


def _streamed(plan: Plan, seconds: Mapping[int, float], took: float, lead: int) -> Iterator[Event]:
    """Yield the events of a plan that streams: all rounds between two syncs as one, for the iteration that
    trains on most of them, and training up to the next sync.

        gen      sync  rounds for 2   sync  rounds for 3
        train    sync     update 1    sync     update 2
    """
    inside = {step.id: step.region and not step.facts.collects for step in plan.steps}
    rest = {step.id: 0.0 if inside[step.id] or step.facts.syncs else seconds[step.id] for step in plan.steps}
    trained = simulate(steady(plan), rest, 1)
    last = max(event.end for event in trained)
    for iteration in range(lead + 3):
        drawn = iteration * took
        used = synced = (iteration + lead) * took
        for step in (step for step in plan.steps if step.facts.syncs):
            yield Event(step, iteration, synced, synced + seconds[step.id])
            synced += seconds[step.id]
            drawn += seconds[step.id] * (not step.facts.lends)
        for step in (step for step in plan.steps if inside[step.id]):
            yield Event(step, iteration, drawn, drawn + seconds[step.id])
            drawn += seconds[step.id] * (not step.beside)
        for event in trained:
            if not inside[event.step.id] and not event.step.facts.syncs:
                shift = used + took - last
                yield Event(event.step, iteration, event.start + shift, event.end + shift)


def places(plan: Plan, step: Step) -> Iterator[DeviceAddress]:
    """Yield the devices that are busy with a step; those of a sync between pools on both sides."""
    yield from ((step.pool, device) for device in step.devices)
    if step.source:
        yield from ((step.source, device) for device in range(plan.pools[step.source]))


def lanes(plan: Plan) -> list[Lane]:
    """Return the devices of all pools, and what runs beside them; neighbours that do the same share a lane.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> [(lane.first, lane.last) for lane in lanes(compile_graph("grpo", devices=8))]
        [(0, 0), (1, 7), (0, 7)]
    """
    pools = [(pool, beside, count) for pool, count in plan.pools.items() for beside in (False, True)]
    busy = {(pool, beside, device): set[int]() for pool, beside, count in pools for device in range(count)}
    for step in plan.steps:
        for pool, device in places(plan, step):
            busy[pool, step.beside, device].add(step.id)
    alike = []
    for (*_, steps), group in groupby(busy, key=lambda place: (*place[:2], frozenset(busy[place]))):
        (pool, beside, first), *_, (*_, last) = [*group] * 2
        if steps or not beside:
            alike.append(Lane(pool, first, last, steps, beside))
    return alike


def arrows(plan: Plan, iterations: int) -> list[Arrow]:
    """Return what steps hand to each other in some iterations: columns and weights."""
    handed = []
    for iteration, step in product(range(iterations), plan.steps):
        names = {number: _carried(plan.steps[number - 1], step) for number in step.after}
        ends = (step.id, iteration)
        handed += [Arrow((number, iteration), ends, name) for number, name in names.items() if name]
        handed += [arrow for arrow in _synced(plan, step, iteration) if arrow.source[1] >= 0]
    return handed


def _carried(source: Step, target: Step) -> str:
    """Return the columns or the weights that one step has of another; nothing where it only waits."""
    if source.joins == target.node:
        return "its loss"
    columns = [column for column in target.reads if column in source.writes]
    same = [f"{name}@{label}" for name, label in target.models.items() if label and name in source.models]
    return ", ".join(columns) or (", ".join(same) if source.updates or source.facts.syncs else "")


def _synced(plan: Plan, step: Step, iteration: int) -> Iterator[Arrow]:
    """Yield the arrows from an earlier iteration's update to the sync that hands its weights over."""
    if not step.facts.syncs:
        return
    for model, version in step.models.items():
        updates = [s.id for s in plan.steps if s.updated == model]
        if updates and version and version.offset <= 0:
            source = iteration - 1 + version.offset
            yield Arrow((updates[-1], source), (step.id, iteration), f"{model}@{version}")


def footprint(plan: Plan) -> Pricing | None:
    """Return the memory and prices of the steps on the plan's cluster; None where none is known here."""
    target = plan.origin.target if plan.origin else None
    # another version may count otherwise than the plan says
    if plan.origin is None or target is None or plan.predicted is None or plan.origin.rlgraph != VERSION:
        return None
    try:
        scenario, sizes = Scenario.of(target), sizes_of(plan)
    except GraphError:  # a saved plan may be looked at where the files that it was made with are not
        return None
    if scenario.cluster.cluster != plan.predicted.cluster:
        return None
    return Pricing(plan, scenario.cluster, scenario.work(plan), sizes, scenario.calibration)


def memory(held: Footprint, pool: str) -> dict[int, Parts]:
    """Return what a device of a pool holds in each training step, part by part; 0: between iterations."""
    moments = {step.id: parts for step, parts in held.moments(pool, held.in_order())}
    moments[0] = held.resident(pool, set(away_items(held.plan, pool)))
    return {n: {part: parts[part] for part in PARTS if parts[part]} for n, parts in moments.items()}
