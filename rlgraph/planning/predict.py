"""Predict what a plan takes on a cluster: seconds and bytes of each step, and the peak of its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlgraph.costs.calibration import Calibration, load_calibration
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.hardware import Cluster, Here
from rlgraph.costs.pricing import Pricing, sizes_of
from rlgraph.costs.step_rates import PUBLISHED, rate_of
from rlgraph.costs.workload import Workload, workload
from rlgraph.errors import GraphError, Problem, fail
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.ir.prediction import Prediction, StreamForecast
from rlgraph.planning.auto_settings import in_flight, settle, synced
from rlgraph.planning.device_groups import inside_hosts
from rlgraph.planning.headline import headline
from rlgraph.planning.host_memory import buffer_bytes, fits, host_bytes, hosts_hold
from rlgraph.planning.lending import lend_where_it_pays
from rlgraph.planning.offload import reside
from rlgraph.planning.overlap import pipeline
from rlgraph.planning.simulate import busy, depth, period, simulate, steady, weighed
from rlgraph.planning.stream_forecast import drawn_in_rounds, forecast
from rlgraph.printing.prediction_text import memory_text
from rlgraph.units import size_text


@dataclass(frozen=True)
class Scenario:
    """The setting of a prediction: a cluster, what is said of the work, and factors measured in a run.

    ``assumptions`` are arguments of ``workload``; what they leave out is as the plan's attributes suggest.
    """

    cluster: Cluster
    assumptions: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None

    @staticmethod
    def of(target: Target, here: Here | None = None) -> Scenario:
        """Load what a target names; ``here`` is what ``auto`` stands for: this machine unless given.

        Raises:
            GraphError: there is no such cluster or calibration, or its file is wrong.
        """
        factors = load_calibration(target.calibration) if target.calibration else None
        cluster = load_cluster(target.cluster, here, target.margin)
        return Scenario(cluster, target.assumptions, factors)

    def work(self, plan: Plan) -> Workload:
        """Return the work of a plan, with these assumptions."""
        return workload(plan, **self.assumptions)


class DoesNotFitError(GraphError):
    """A plan needs more memory than its devices have.

    Attributes:
        pricing: of the plan, with every move of engines that helps.
        unmoved: the plan without these moves, with everything settled.
    """

    def __init__(self, pricing: Pricing, unmoved: Plan) -> None:
        self.pricing = pricing
        self.unmoved = unmoved
        peaks = pricing.peaks()
        pool, worst = max(peaks.items(), key=lambda item: item[1].lacks)
        needed, capacity = size_text(worst.bytes), size_text(worst.capacity)
        law = f"{pricing.plan.graph} does not fit on {pricing.cluster.cluster}: "
        law += f"a device of pool {pool} needs {needed} in `{worst.step}`, and "
        if worst.free:
            law += f"may use {size_text(worst.capacity - worst.free)} of {capacity} "
            law += f"({size_text(worst.free)} stay free)"
        else:
            law += f"has {capacity}"
        super().__init__([Problem("does-not-fit", law, drawing="\n".join(memory_text(peaks)))])


def predict(plan: Plan, scenario: Scenario, must_fit: bool = True) -> Plan:
    """Return the plan with ``seconds`` and ``bytes`` of its training steps, ``peak`` and ``predicted``.

    Args:
        plan: made for as many devices as the cluster has, or fewer.
        scenario: what it is to run on, and with what.
        must_fit: refuse a plan that its devices do not hold.

    Raises:
        DoesNotFitError: the plan does not fit; with where its memory goes.
        GraphError: a model of unknown size, or a pool larger than the cluster.
    """

    def lay(candidate: Plan) -> tuple[Pricing, Plan]:
        return laid_out(candidate, scenario)

    pricing, unmoved = lend_where_it_pays(plan, lay(plan), lay, _predicted)
    peaks = {}
    for pool, peak in pricing.peaks().items():
        peaks[pool] = replace(peak, host=+host_bytes(pricing, pool))
    if must_fit and not all(peak.fits for peak in peaks.values()):
        raise DoesNotFitError(pricing, unmoved)
    hosts_hold(pricing)
    return replace(priced(pricing), peak=peaks)


def priced(pricing: Pricing) -> Plan:
    """Return a plan with the seconds and bytes of its steps, its prediction and its headline."""
    steps = tuple(map(pricing.priced, pricing.plan.steps))
    predicted = prediction(pricing, steps)
    if predicted.stream:
        steps = drawn_in_rounds(steps, predicted.stream)
    plan = replace(pricing.plan, steps=steps)
    figures = headline(replace(pricing, plan=plan), predicted)
    return replace(plan, predicted=replace(predicted, headline=figures))


def laid_out(plan: Plan, scenario: Scenario) -> tuple[Pricing, Plan]:
    """Return the plan in its order on a cluster, with engines moved where it helps; and without the moves.

    Raises:
        GraphError: as ``predict``, but for a plan that does not fit on its devices.
    """
    cluster = scenario.cluster
    inside_hosts(plan, cluster)
    if sum(plan.pools.values()) > cluster.total:
        large = [f"pool `{name}` has {count} devices" for name, count in plan.pools.items()]
        raise fail("pool-size", f"{', '.join(large)}; {cluster.cluster} has {cluster.total}", None)
    work = scenario.work(plan)
    pricing = Pricing(plan, cluster, work, sizes_of(plan), scenario.calibration)
    plan = synced(pricing)
    pricing = replace(pricing, plan=plan)
    _holds_a_sample(plan, work)

    def lay(settled: Plan) -> tuple[Pricing, Plan]:
        guessed = replace(pricing, plan=settled)
        ordered = pipeline(settled, {step.id: guessed.middle(step) for step in settled.steps})
        laid = replace(pricing, plan=ordered)
        return replace(laid, plan=reside(laid)), ordered

    def seconds(laid: Pricing) -> float:
        return math.prod(_predicted(laid).seconds)

    return settle(plan, work.most, lay, fits, seconds)


def _predicted(pricing: Pricing) -> Prediction:
    return prediction(pricing, [*map(pricing.priced, pricing.plan.steps)])


def _holds_a_sample(plan: Plan, work: Workload) -> None:
    """Check that a cache that the graph gives has room for the longest sample."""
    for name, model in plan.models.items():
        if model.serve is None:
            continue
        tokens, copies = model.serve.cache_tokens, model.serve.attention_replicas
        if not isinstance(tokens, int) or tokens >= work.most * copies:
            continue
        law = f"models.{name}.serve.cache_tokens: {tokens:,} tokens hold no sample of {work.most:,.0f}, "
        law += "which prompt and response may have together"
        if copies > 1:
            law += f", in each of {copies} copies of attention"
        least = math.ceil(work.most) * copies
        raise fail("cache-size", law, None, remedy=f"give at least {least:,}, or auto")


def prediction(pricing: Pricing, steps: Sequence[Step]) -> Prediction:
    """Predict an iteration of these priced steps in the steady state, and how busy each pool is."""
    plan = pricing.plan
    stream = forecast(pricing, steps)
    if stream:
        steps = drawn_in_rounds(steps, stream)
    best, busy_at_best = _iteration(plan, steps, 0, stream)
    worst, busy_at_worst = _iteration(plan, steps, 1, stream)
    pools = {}
    for pool in plan.pools:
        pools[pool] = round(busy_at_best[pool], 6), round(busy_at_worst[pool], 6)
    notes = [*pricing.work.assumed]
    for node, size in buffer_bytes(plan, pricing.work).items():
        notes.append(f"the rows that {node} holds take {size_text(size)} of its host")
    notes += _range_notes(pricing, steps)
    if plan.schedule.stream and not stream:
        notes.append("what streams takes turns with training: several regions are not simulated together")
    flights = {step.node: in_flight(pricing, step) for step in steps if step.generates}
    calibration = pricing.calibration.calibration if pricing.calibration else ""
    return Prediction(
        pricing.cluster.cluster, (best, worst), pools, tuple(notes), flights, calibration, stream=stream
    )


def _range_notes(pricing: Pricing, steps: Sequence[Step]) -> Iterator[str]:
    """Yield where the ranges of seconds come from, and which kinds of work have them."""
    calibration = pricing.calibration
    measured, published, assumed = list[str](), list[str](), list[str]()
    for kind in sorted({rate_of(step) for step in steps if step.seconds}):
        if calibration and calibration.of(kind):
            measured.append(kind)
        elif kind in PUBLISHED and pricing.plan.device == "cuda":
            published.append(kind)
        else:
            assumed.append(kind)
    if measured:
        assert calibration
        yield f"seconds of {', '.join(measured)}: as measured in {calibration.calibration}"
    if published:
        yield f"seconds of {', '.join(published)}: within the range of published measurements"
    if assumed:
        yield f"seconds of {', '.join(assumed)}: within assumed ranges (--calibration)"


def _iteration(
    plan: Plan, steps: Sequence[Step], grade: int, stream: StreamForecast | None
) -> tuple[float, dict[str, float]]:
    """Return the seconds of an iteration at best or at worst, and for how many of them each pool is busy."""
    seconds = weighed(plan, {step.id: step.seconds[grade] for step in steps if step.seconds})
    busy_seconds = busy(plan, seconds)
    if stream:
        return stream.seconds[grade], busy_seconds
    count = 4 * (depth(plan) + 1) if depth(plan) else 1
    return round(period(simulate(steady(plan), seconds, count), count), 6), busy_seconds
