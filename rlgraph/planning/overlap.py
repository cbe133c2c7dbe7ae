"""Overlap generation with training: how far ahead each step runs, and the order of submission.

Time is cut into slots. In slot t a step runs for iteration t + its lead; updates have lead 0, generation on a
pool of its own has lead k, the staleness of ``schedule.buffer`` by batch:

    slot       -1            0             1             2
    gen     rollout(0)   rollout(1)    rollout(2)                     lead 1
    train                 update(0)     update(1)     update(2)       lead 0
            prologue     steady state               epilogue

What a step waits for leads as far at least, and what reads weights that are trained can't lead. The rest is
free: every choice for a pool is simulated, and the shortest iteration wins. Within a slot the steps are put
in the order in which they could start (list scheduling by the longest path).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product

from rlgraph.ir.actions import Collect, RunOp, Sync
from rlgraph.ir.digraph import DiGraph
from rlgraph.ir.intervals import cycle, settled
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.renumber import with_order
from rlgraph.planning.simulate import BrokenPlanError, occupied, period, simulate, steady, weighed

# where no cluster says what steps take: relative times, in the order of what they usually take
ROLLOUT, UPDATE, SCORE, SYNC, ON_HOST = 4.0, 3.0, 1.0, 0.2, 0.01
PROVED = 1_000  # iterations through which versions are followed, at most
CHOICES = 256  # so many leads are tried; where there are more, only the ends


def pipeline(plan: Plan, seconds: Mapping[int, float] | None = None) -> Plan:
    """Return the plan with ``lead``, ``slot`` and an order of steps, for the shortest steady state.

    A plan without anything that may run ahead comes back as it is. It has no moves of engines yet. Seconds
    are by a step's number; they are rough guesses unless given.
    """
    depth = plan.schedule.ahead
    leading = _readers_of_older_weights(plan)
    if not depth or not leading:
        return plan
    took = weighed(plan, seconds or {step.id: guess(step) for step in plan.steps})
    limits = _limits(plan, leading, depth)
    best = plan
    lowest = (math.inf, 0)  # seconds, and of equal ones the sum of leads
    for leads in _choices(plan, limits, depth):
        for candidate in _orders(plan, leads, took):
            total_lead = sum(step.lead for step in candidate.steps)
            cost = _cost(candidate, took, plan), total_lead
            if cost < lowest:
                best, lowest = candidate, cost
    assert lowest[0] < math.inf, f"{plan.graph}: no order of its steps overlaps"
    _keeps_promises(best)
    return best


def _readers_of_older_weights(plan: Plan) -> set[int]:
    """Return the steps that may run ahead, since they read weights from before the last update."""
    numbers = set()
    for step in plan.steps:
        for version in step.models.values():
            if version and version.is_older:
                numbers.add(step.id)
    return numbers


def _keeps_promises(plan: Plan) -> None:
    """Prove the versions again where some iterations leave out steps: through a whole cycle of them."""
    intervals = [step.when for step in plan.steps]
    if not any(intervals):
        return
    iterations = min(settled(intervals) + cycle(intervals), PROVED) + plan.schedule.ahead
    seconds = {step.id: 1.0 for step in plan.steps}  # versions don't depend on how long a step takes
    simulate(plan, seconds, iterations)


def guess(step: Step) -> float:
    """Return how long a step takes relative to others, where nothing is known."""
    match step.action:
        case Sync():
            return SYNC
        case RunOp(engine="serve"):
            return ROLLOUT
        case RunOp(updates=True):
            return UPDATE
        case RunOp(engine="train", joins=""):
            return SCORE
        case _:
            return ON_HOST


def _cost(ordered: Plan, took: Mapping[int, float], unordered: Plan) -> float:
    """Return the seconds of an iteration in the steady state, infinity for an order that breaks a promise."""
    seconds_of_node = {step.node: took[step.id] for step in unordered.steps}
    seconds = {step.id: seconds_of_node[step.node] for step in ordered.steps}
    count = 4 * (1 + max(step.lead for step in ordered.steps))
    try:
        return round(period(simulate(steady(ordered), seconds, count), count), 9)
    except BrokenPlanError:
        return math.inf


def _limits(plan: Plan, leading: set[int], depth: int) -> dict[int, tuple[int, int]]:
    """Return step -> the least and the most that it may lead."""
    trained = {step.updated for step in plan.steps if step.updated}
    most: dict[int, int] = {}
    for step in plan.steps:
        reads_older = step.id in leading
        reads_trained = bool(trained & step.models.keys())
        limit = depth
        if reads_trained and not reads_older:
            limit = 0
        for need in step.after:  # what it needs has to run in the same slot or an earlier one
            limit = min(limit, most[need])
        most[step.id] = limit
    least: dict[int, int] = {}
    for step in reversed(plan.steps):
        limit = depth if step.id in leading else 0
        for reader in plan.needs["train"].predecessors(step.id):
            limit = max(limit, least[reader])
        least[step.id] = limit
    limits = {number: (least[number], most[number]) for number in most}
    for region in plan.regions:  # a region is repeated as one piece
        inside = [step.id for step in plan.steps if step.region == region]
        lead = max(least[number] for number in inside)
        limits |= dict.fromkeys(inside, (lead, lead))
    return limits


def _choices(plan: Plan, limits: Mapping[int, tuple[int, int]], depth: int) -> Iterator[dict[int, int]]:
    """Yield the leads of all steps, for every choice of how far each pool leads where its steps are free."""
    movable = set()
    for step in plan.steps:
        low, high = limits[step.id]
        if low < high:
            movable.add(step.pool)
    free = [pool for pool in plan.pools if pool in movable]
    values: Sequence[int] = range(depth + 1)
    if len(values) ** len(free) > CHOICES:
        values = (0, depth)
    known = set()
    for choice in product(values, repeat=len(free)):
        leads = _leads(plan, limits, dict(zip(free, choice, strict=True)))
        key = tuple(leads.values())
        if key not in known:
            known.add(key)
            yield leads


def _leads(
    plan: Plan, limits: Mapping[int, tuple[int, int]], lead_of_pool: Mapping[str, int]
) -> dict[int, int]:
    """Return how far each step leads: as its pool does within its limits, and no further than its inputs."""
    leads: dict[int, int] = {}
    for step in plan.steps:
        low, high = limits[step.id]
        for need in step.after:
            high = min(high, leads[need])
        wanted = lead_of_pool.get(step.pool, low)
        leads[step.id] = min(max(wanted, low), high)
    return leads


def _orders(plan: Plan, leads: Mapping[int, int], took: Mapping[int, float]) -> Iterator[Plan]:
    """Yield the plan with these leads, in the order of list scheduling, and with one lead after the other."""
    steps = [replace(step, lead=leads[step.id]) for step in plan.steps]
    by_lead = sorted(steps, key=lambda step: -step.lead)
    orders = set()
    for ordered in (_by_start(steps, took), by_lead):
        slot = _together(ordered)
        order = tuple(step.id for step in slot)
        if order in orders:
            continue
        orders.add(order)
        # one iteration meets what leads first
        yield with_order(plan, sorted(slot, key=lambda step: -step.lead), order)


def _together(steps: Sequence[Step]) -> list[Step]:
    """Return the steps of each region right in front of what collects their rows, as the driver runs them."""
    order: list[Step] = []
    for step in steps:
        if isinstance(step.action, Collect):
            in_region = [candidate for candidate in steps if candidate.region == step.region]
            in_region.remove(step)
            order += [*in_region, step]
        elif not step.region:
            order.append(step)
    return order


def _by_start(steps: Sequence[Step], took: Mapping[int, float]) -> list[Step]:
    """Return the steps of a slot by when they can start; of those that can, what begins the longest chain."""
    by_id = {step.id: step for step in steps}
    needs = _needs(steps)
    rank: dict[int, float] = {}  # seconds of the longest chain that a step begins
    for number in chain.from_iterable(needs.generations()):  # readers first
        longest_behind = 0.0
        for reader in needs.predecessors(number):
            longest_behind = max(longest_behind, rank[reader])
        rank[number] = took[number] + longest_behind
    inputs_at = dict.fromkeys(by_id, 0.0)  # step -> the time at which all it needs is there
    free_at: dict[str, float] = {}  # pool -> the time at which its steps so far have ended
    open_needs: dict[int, int] = {}  # step -> how many of its needs are not in the order yet
    ready: list[tuple[float, float, int]] = []  # a heap: when a step may start, its rank, its number
    for number in needs:
        open_needs[number] = len(needs.successors(number))
        if not open_needs[number]:
            ready.append((0.0, -rank[number], number))
    heapq.heapify(ready)
    order: list[Step] = []
    while ready:
        time, negative_rank, number = heapq.heappop(ready)
        step = by_id[number]
        pools = occupied(step)
        start = time
        for pool in pools:
            start = max(start, free_at.get(pool, 0.0))
        if start > time:  # a pool is busy: another step may go first
            heapq.heappush(ready, (start, negative_rank, number))
            continue
        order.append(step)
        end = start + took[number]
        for pool in pools:
            free_at[pool] = end
        for reader in needs.predecessors(number):
            inputs_at[reader] = max(inputs_at[reader], end)
            open_needs[reader] -= 1
            if not open_needs[reader]:
                heapq.heappush(ready, (inputs_at[reader], -rank[reader], reader))
    return order


def _needs(steps: Sequence[Step]) -> DiGraph[int]:
    """Return the steps of a slot by number, with an edge from each to those that must come before it."""
    leads = {step.id: step.lead for step in steps}
    edges = []
    for step in steps:
        for need in step.after:
            if leads[need] == step.lead:  # else it ran in an earlier slot
                edges.append((step.id, need))
    needs = DiGraph(leads, edges)
    leading_syncs = [step for step in steps if isinstance(step.action, Sync) and step.lead]
    for step in steps:
        for sync in leading_syncs:
            # the weights that generation is to have are sent before they are trained further
            if step.updated and step.updated in sync.models:
                needs.add_edge(step.id, sync.id)
    return needs
