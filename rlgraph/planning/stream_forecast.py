"""Predict a plan that streams: its rounds priced, simulated, and set against the same devices without.

Ages, and what waits in the buffer, are those of the steady state at best and at worst rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

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


def forecast(pricing: Pricing, steps: Sequence[Step]) -> StreamForecast | None:
    """Return what streaming comes to with these priced steps; None where no region streams, or several do."""
    plan, region = pricing.plan, _streaming(pricing.plan)
    if region is None:
        return None
    courses, drawing, together, ahead = list[SteadyState](), list[float](), list[float](), list[float]()
    drawn = _drawn(pricing, region)
    lending = {step.id for step in plan.steps if step.pool in plan.lenders and "serve" in step.engines}
    for grade in (0, 1):
        seconds = weighed(plan, {step.id: step.seconds[grade] for step in steps if step.seconds})
        course = simulate_stream(*_simulated(pricing, region, 1 - grade, seconds))
        others = busy(plan, seconds)[drawn.pool] - seconds[drawn.id]
        courses.append(course)
        drawing.append(max(course.generating - others, 0.0))
        alone = {n: took * (n not in lending) for n, took in seconds.items()}
        together.append(_chain(plan, alone))
        ahead.append(max(*busy(plan, alone).values(), together[-1] / (region.keep + 1)))
    best, worst = courses
    assert plan.schedule.stream
    return StreamForecast(
        seconds=(round(best.seconds, 6), round(worst.seconds, 6)),
        drawing=(round(drawing[0], 6), round(drawing[1], 6)),
        fill=(round(best.fill, 6), round(worst.fill, 6)),
        age=(round(best.age, 4), round(worst.age, 4)),
        oldest=max(best.oldest, worst.oldest),
        dropped=(round(best.dropped, 4), round(worst.dropped, 4)),
        bound=None if plan.schedule.stream.too_old == "correct" else region.keep,
        waiting=max(best.waiting, worst.waiting),
        begun=region.max_rows_in_flight,
        synchronous=(round(together[0], 6), round(together[1], 6)),
        ahead=(round(ahead[0], 6), round(ahead[1], 6)) if region.keep else None,
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
    drawing_in = {step.region for step in plan.steps if step.unfinished}
    streams = [region for name, region in plan.regions.items() if region.streams and name in drawing_in]
    return streams[0] if len(streams) == 1 else None


def drawn_in_rounds(steps: Sequence[Step], told: StreamForecast) -> tuple[Step, ...]:
    """Return the steps, of those that draw rows the seconds of an iteration's rounds."""
    return tuple(replace(step, seconds=told.drawing) if step.unfinished else step for step in steps)


def _drawn(pricing: Pricing, region: Region) -> Step:
    return next(step for step in pricing.plan.steps if step.region == region.filter and step.unfinished)


def _chain(plan: Plan, seconds: dict[int, float]) -> float:
    """Return the seconds of the steps of one iteration, by itself."""
    return period(simulate(steady(plan), seconds, 1), 1)


def _simulated(
    pricing: Pricing, region: Region, grade: int, seconds: dict[int, float]
) -> tuple[RegionWork, float, float]:
    """Return the work of a region's rounds at one grade, and the seconds of an update and of a sync."""
    plan = pricing.plan
    syncs = {step.id for step in plan.steps if step.kind is Kind.SYNC}
    in_region = [step for step in plan.steps if step.region == region.filter]
    inside = {step.id for step in in_region if step.kind is not Kind.COLLECT}
    update, sync = (
        _chain(plan, {n: took * (n in part) for n, took in seconds.items()})
        for part in (seconds.keys() - syncs - inside, syncs)
    )
    return _work(pricing, region, grade, seconds), update, sync


def _work(pricing: Pricing, region: Region, grade: int, seconds: dict[int, float]) -> RegionWork:
    """Return the work of a region's rounds at one grade."""
    plan, work, drawn = pricing.plan, pricing.work, _drawn(pricing, region)
    stream = plan.schedule.stream
    assert stream
    function = plan.functions[drawn.phase][drawn.node]
    lengths = work.limited(function)
    rows = region.rows / region.expected
    chunk = float(function.attributes.get("chunk") or lengths.longest)
    rounds = max(math.ceil(lengths.longest / chunk / ROUNDS), 1)  # that are simulated as one
    serve = pricing.serve(drawn.model)
    # at servers samples stay in flight from round to round
    gap = 0.0 if serving(serve).own_servers else pricing.calibrated("round", grade, ASSUMED.round.__getitem__)
    step = ASSUMED.step[grade]
    in_region = [other for other in plan.steps if other.region == region.filter]
    inside = [other for other in in_region if other.kind is not Kind.COLLECT and other is not drawn]
    each = {here: [0.0, 0.0] for here in (True, False)}
    for measure in inside:
        cost = each[drawn.pool in occupied(measure)]  # seconds of a round, and of each row in it
        cost[0] += rounds * min(step, seconds[measure.id])
        cost[1] += max(seconds[measure.id] - step, 0.0) / rows
    tokens = lengths.spread(round(rows))
    Random(SEED).shuffle(tokens)
    engines = [pricing.generation(drawn, end) for end in (WORST, BEST)]

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
        servers=min(
            len(drawn.devices) // serve.tensor_parallel, region.max_rows_in_flight // region.times or 1
        ),
        slots=pricing.slots(drawn),
        decode=decode,
        read=read,
        measuring_on_pool=(each[True][0] + rounds * gap, each[True][1]),
        measuring_elsewhere=(each[False][0], each[False][1]),
        kept_share=region.expected,
        lent_servers=sum(plan.pools[pool] for pool in plan.lenders) // serve.tensor_parallel,
    )
