"""Predict a plan that streams: its rounds priced, simulated, and set against the same devices without.

Ages, and what waits in the buffer, are those of the steady state at best and at worst rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from rlgraph.costs import formulas
from rlgraph.costs.efficiency import ASSUMED, BEST, WORST
from rlgraph.costs.pricing import Pricing
from rlgraph.engines.registry import serving
from rlgraph.ir.actions import Kind
from rlgraph.ir.graph import Region
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.prediction import StreamForecast
from rlgraph.planning.simulate import busy, occupied, period, simulate, steady, weighed
from rlgraph.streaming.rules import Window
from rlgraph.streaming.simulate import (
    RegionWork,
    SteadyState,
    StreamCourse,
    simulate_stream,
    stream_course,
)

ROUNDS = 96  # of the longest sample, at most: finer chunks are simulated several together
SEED = 20  # of the order in which lengths come


class _AtGrade(NamedTuple):
    """The forecast at best or at worst rates. Seconds are of an iteration."""

    course: SteadyState
    drawing: float  # of the rounds
    synchronous: float  # without streaming, where generation and training take turns
    ahead: float  # without streaming, where generation is as many iterations ahead as rows may be old


def forecast(pricing: Pricing, steps: Sequence[Step]) -> StreamForecast | None:
    """Return what streaming comes to with these priced steps; None where no region streams, or several do."""
    plan, region = pricing.plan, _streaming(pricing.plan)
    if region is None:
        return None
    best = _at_grade(pricing, region, steps, BEST)
    worst = _at_grade(pricing, region, steps, WORST)
    stream = plan.schedule.stream
    assert stream
    bound, ahead = None, None
    if stream.too_old != "correct":
        bound = region.keep
    if region.keep:
        ahead = (round(best.ahead, 6), round(worst.ahead, 6))
    return StreamForecast(
        seconds=(round(best.course.seconds, 6), round(worst.course.seconds, 6)),
        drawing=(round(best.drawing, 6), round(worst.drawing, 6)),
        fill=(round(best.course.fill, 6), round(worst.course.fill, 6)),
        age=(round(best.course.age, 4), round(worst.course.age, 4)),
        oldest=max(best.course.oldest, worst.course.oldest),
        dropped=(round(best.course.dropped, 4), round(worst.course.dropped, 4)),
        bound=bound,
        waiting=max(best.course.waiting, worst.course.waiting),
        begun=region.max_rows_in_flight,
        synchronous=(round(best.synchronous, 6), round(worst.synchronous, 6)),
        ahead=ahead,
    )


def _at_grade(pricing: Pricing, region: Region, steps: Sequence[Step], grade: int) -> _AtGrade:
    plan, rollout = pricing.plan, _rollout(pricing, region)
    place = 0 if grade == BEST else 1  # of a grade in a step's seconds
    seconds = weighed(plan, {step.id: step.seconds[place] for step in steps if step.seconds})
    course = simulate_stream(*_simulated(pricing, region, grade, seconds))
    other_work = busy(plan, seconds)[rollout.pool] - seconds[rollout.id]
    unlent = dict(seconds)
    for step in plan.steps:
        if step.pool in plan.lenders and "serve" in step.engines:
            unlent[step.id] = 0.0
    synchronous = _chain(plan, unlent)
    return _AtGrade(
        course=course,
        drawing=max(course.generating - other_work, 0.0),
        synchronous=synchronous,
        ahead=max(*busy(plan, unlent).values(), synchronous / (region.keep + 1)),
    )


def predicted_course(pricing: Pricing, iterations: int) -> StreamCourse | None:
    """Return what becomes of the groups of the first iterations at best rates; None as of ``forecast``."""
    plan, region = pricing.plan, _streaming(pricing.plan)
    if region is None:
        return None
    seconds = weighed(plan, {step.id: step.seconds[0] for step in plan.steps if step.seconds})
    return stream_course(*_simulated(pricing, region, BEST, seconds), iterations)


def _streaming(plan: Plan) -> Region | None:
    """Return the region that streams; None where none does, or several do."""
    regions_that_draw = {step.region for step in plan.steps if step.unfinished}
    streams = []
    for name, region in plan.regions.items():
        if region.streams and name in regions_that_draw:
            streams.append(region)
    if len(streams) != 1:
        return None
    return streams[0]


def drawn_in_rounds(steps: Sequence[Step], stream: StreamForecast) -> tuple[Step, ...]:
    """Return the steps, where those that draw rows have the seconds of an iteration's rounds."""
    priced = []
    for step in steps:
        if step.unfinished:
            step = replace(step, seconds=stream.drawing)
        priced.append(step)
    return tuple(priced)


def _rollout(pricing: Pricing, region: Region) -> Step:
    """Return the step that draws the rows of a region."""
    return next(step for step in pricing.plan.steps if step.region == region.filter and step.unfinished)


def _chain(plan: Plan, seconds: dict[int, float]) -> float:
    """Return the seconds of the steps of one iteration, by itself."""
    return period(simulate(steady(plan), seconds, 1), 1)


def _simulated(
    pricing: Pricing, region: Region, grade: int, seconds: dict[int, float]
) -> tuple[RegionWork, float, float]:
    """Return the work of a region's rounds at one grade, and the seconds of an update and of a sync."""
    plan = pricing.plan
    of_update = dict.fromkeys(seconds, 0.0)
    of_sync = dict.fromkeys(seconds, 0.0)
    for step in plan.steps:
        in_round = step.region == region.filter and step.kind is not Kind.COLLECT
        if step.kind is Kind.SYNC:
            of_sync[step.id] = seconds[step.id]
        elif not in_round:
            of_update[step.id] = seconds[step.id]
    update, sync = _chain(plan, of_update), _chain(plan, of_sync)
    return _work(pricing, region, grade, seconds), update, sync


def _work(pricing: Pricing, region: Region, grade: int, seconds: dict[int, float]) -> RegionWork:
    """Return the work of a region's rounds at one grade."""
    plan, work, rollout = pricing.plan, pricing.work, _rollout(pricing, region)
    stream = plan.schedule.stream
    assert stream
    function = plan.functions[rollout.phase][rollout.node]
    lengths = work.limited(function)
    rows = region.rows / region.expected
    chunk = float(function.attributes.get("chunk") or lengths.longest)
    rounds = max(math.ceil(lengths.longest / chunk / ROUNDS), 1)  # that are simulated as one
    serve = pricing.serve(rollout.model)
    gap = 0.0  # at servers samples stay in flight from round to round
    if not serving(serve).own_servers:
        gap = pricing.calibrated("round", grade, ASSUMED.round.__getitem__)
    fixed = ASSUMED.step[grade]  # seconds of a step however few rows it has
    on_pool, elsewhere = [0.0, 0.0], [0.0, 0.0]  # seconds of a round, and of each row in it
    for step in plan.steps:
        if step.region != region.filter or step.kind is Kind.COLLECT or step is rollout:
            continue
        cost = on_pool if rollout.pool in occupied(step) else elsewhere
        cost[0] += rounds * min(fixed, seconds[step.id])
        cost[1] += max(seconds[step.id] - fixed, 0.0) / rows
    tokens = lengths.spread(round(rows))
    Random(SEED).shuffle(tokens)
    engines = {end: pricing.generation(rollout, end) for end in (WORST, BEST)}
    servers = len(rollout.devices) // serve.tensor_parallel
    groups = region.max_rows_in_flight // region.times

    def decode(samples: float, context: float) -> float:
        def price(end: int) -> float:
            size, rates, graphs = engines[end]
            return formulas.decode_step_seconds(size, rates, samples, context, graphs)

        return pricing.calibrated("generate", grade, price)

    def read(samples: float, length: float) -> float:
        def price(end: int) -> float:
            size, rates, _ = engines[end]
            return formulas.prefill_seconds(size, rates, samples, length)

        return pricing.calibrated("generate", grade, price)

    return RegionWork(
        window=Window.of_stream(region, stream),
        lengths=tokens,
        prompt=work.prompt,
        chunk=chunk * rounds,
        servers=min(servers, groups or 1),
        slots=pricing.slots(rollout),
        decode=decode,
        read=read,
        measuring_on_pool=(on_pool[0] + rounds * gap, on_pool[1]),
        measuring_elsewhere=(elsewhere[0], elsewhere[1]),
        kept_share=region.expected,
        lent_servers=sum(plan.pools[pool] for pool in plan.lenders) // serve.tensor_parallel,
    )
