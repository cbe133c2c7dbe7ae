"""Lend the pool that trains to generation that streams, while it waits for rows.

    gen      ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
    train    update 1    ▇▇▇ ▇▇▇ ▇▇▇ update 2    ▇▇▇     rounds over some of what gen has begun

A step inserted before the rows are collected brings the weights, which are there, to an engine of the pool's
own; from there on until then its devices hold both. Where the graph does not say, a plan for a cluster lends
the pool if that fits, and an iteration is shorter for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlgraph.engines.registry import SERVING
from rlgraph.errors import fail
from rlgraph.ir.actions import IN_PLACE, Collect, Lend, Sync
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.prediction import Prediction
from rlgraph.ir.renumber import surrounded, with_order
from rlgraph.ir.steps import Version
from rlgraph.ops.registry import load
from rlgraph.units import middle, size_text

if TYPE_CHECKING:
    from rlgraph.costs.pricing import Pricing
    from rlgraph.planning.auto_settings import Laid

LEAST = 0.02  # of an iteration: the least gain for which a pool is lent
ASKED = "the graph asks for it (`schedule.buffer.lend`)"


def lend_asked(plan: Plan) -> Plan:
    """Return the plan whose pool is lent where the graph says so.

    Raises:
        GraphError: it can't be.
    """
    stream = plan.schedule.stream
    if stream is None or stream.lend is not True:
        return plan
    reason = unfit(plan)
    if reason:
        law = f"`schedule.buffer.lend: true`, and {reason}"
        raise fail("no-lend", law, None, remedy="set: {schedule.buffer.lend: false}")
    return with_lent_pool(plan, ASKED)


def lend_where_it_pays(
    plan: Plan, alone: Laid, lay: Callable[[Plan], Laid], predicted: Callable[[Pricing], Prediction]
) -> Laid:
    """Return the plan laid out with its pool lent, and why; or as it is ``alone``, with a note why not."""
    from rlgraph.planning.host_memory import fits  # with all that a plan for a cluster needs

    stream = plan.schedule.stream
    if stream is None or stream.lend != "auto" or not fits(alone[0]):
        return alone
    pool = lender(plan)

    def not_lent(reason: str) -> Laid:
        note = f"pool {pool} is not lent to generation: {reason}"
        return _noted(alone, lambda laid_plan: replace(laid_plan, notes=(*laid_plan.notes, note)))

    reason = unfit(plan)
    if reason:
        return not_lent(reason)
    prediction = predicted(alone[0])
    if not prediction.stream:
        return not_lent("several regions that stream are not simulated together")
    seconds = middle(prediction.seconds)
    waits = 1 - middle(prediction.pools[pool]) / seconds
    waiting = f"it waits for {waits:.0%} of an iteration"
    if waits <= LEAST:
        return not_lent(waiting)
    laid = lay(with_lent_pool(plan, ""))
    pricing, _ = laid
    if not fits(pricing):
        peak = pricing.peaks()[pool]
        sizes = f"{size_text(peak.bytes)} of {size_text(peak.capacity)}"
        return not_lent(f"with its engine a device takes {sizes} in `{peak.step}`")
    lent_seconds = middle(predicted(pricing).seconds)
    if lent_seconds >= (1 - LEAST) * seconds:
        times = f"{lent_seconds:.3g} s, without {seconds:.3g} s"
        return not_lent(f"{waiting}, which would not be {LEAST:.0%} shorter: {times}")
    saved = 1 - lent_seconds / seconds
    engine = size_text(_engine_bytes(pricing, pool))
    because = f"{pool} waits for {waits:.0%} of an iteration, which is {saved:.0%} shorter for it; "
    because += f"its engine takes {engine} of a device"
    return _noted(laid, lambda laid_plan: _because(laid_plan, because))


def _noted(laid: Laid, change: Callable[[Plan], Plan]) -> Laid:
    return replace(laid[0], plan=change(laid[0].plan)), change(laid[1])


def _because(plan: Plan, reason: str) -> Plan:
    """Return the plan whose steps that lend a pool have a reason."""
    steps = []
    for step in plan.steps:
        if isinstance(step.action, Lend):
            step = replace(step, because=reason)
        steps.append(step)
    return replace(plan, steps=tuple(steps))


def _engine_bytes(pricing: Pricing, pool: str) -> int:
    """Return the bytes of the engine on a pool that is lent, while it generates."""
    total = 0
    for item, size in pricing.items(pool).items():
        if item.engine == "serve":
            total += size
    steps = pricing.plan.steps
    collect = next(step for step in steps if isinstance(step.action, Collect) and step.pool == pool)
    return total + pricing.transient(pool, collect).total()


def with_lent_pool(plan: Plan, because: str) -> Plan:
    """Return the plan with the step that lends the pool on which the model that streams trains."""
    drawing = _drawing(plan)
    in_region = [step for step in plan.steps if step.region == drawing.region]
    collect = next(step for step in in_region if isinstance(step.action, Collect))
    pool, serve = lender(plan), plan.models[drawing.model].serve
    assert serve
    sync, version = _synced(plan, drawing)
    step = replace(
        sync,
        id=len(plan.steps) + 1,
        node=f"lend:{pool}",
        pool=pool,
        devices=tuple(range(plan.pools[pool])),
        because=because,
        after=(sync.id,),
        action=Lend(drawing.model, version, SERVING[serve.engine].paths[0]),
    )
    around = {collect.id: ([step], ())}
    slot = surrounded([plan.steps[number - 1] for number in plan.slot], around)
    return with_order(plan, surrounded(plan.steps, around), [step.id for step in slot])


def _synced(plan: Plan, drawing: Step) -> tuple[Step, Version]:
    """Return the first sync of the model that draws rows, and the version that it sends."""
    for step in plan.steps:
        if isinstance(step.action, Sync) and step.action.model in drawing.models:
            return step, step.action.version
    raise AssertionError(f"{plan.graph}: no sync of the model of `{drawing.node}`")


def lender(plan: Plan) -> str:
    """Return the pool on which the model that streams trains."""
    train = plan.models[next(iter(_drawing(plan).models))].train
    assert train
    return train.pool


def unfit(plan: Plan) -> str:
    """Return why the pool that trains can't be lent, whatever its devices hold; "" where it can."""
    drawing, stream = _drawing(plan), plan.schedule.stream
    serve = plan.models[drawing.model].serve
    assert serve and stream
    lent_devices = plan.pools[lender(plan)]
    if serve.addresses:
        return "its weights go to servers at addresses"
    if serve.hosts > 1 or lent_devices % serve.tensor_parallel:
        return f"its {lent_devices} devices do not divide into servers of {serve.tensor_parallel}"
    rollout = load(plan.functions[drawing.phase][drawing.node].target)
    if rollout.declared.leaves_with:
        return f"the conversations that `{drawing.node}` leaves unfinished stay on their worker"
    if stream.order == "in_order":
        return "`order: in_order` repeats to the bit, while which pool draws a sample depends on time"
    measuring = []  # the steps of the region, but for the one that draws and the one that collects
    for step in plan.steps:
        if step.region == drawing.region and step is not drawing and not isinstance(step.action, Collect):
            measuring.append(step)
    for step in measuring:
        if step.pool == drawing.pool and step.engines:
            return f"`{step.node}` measures what is drawn with an engine that is on pool {step.pool} alone"
    devices = plan.pools[drawing.pool]
    if devices == lent_devices:
        return ""
    # columns that are read where they lie have a part of the rows on each device of their pool
    reads_in_place = any(_reads_in_place(plan, step, drawing.pool) for step in measuring)
    if devices == 1 or reads_in_place:
        return f"its {lent_devices} devices do not hold rows as the {devices} of pool {drawing.pool} do"
    return ""


def _reads_in_place(plan: Plan, step: Step, pool: str) -> bool:
    """Return whether a step reads columns of another pool as they lie there."""
    if step.pool == pool or step.kind not in IN_PLACE:
        return False
    on_pool: set[str] = set()
    for writer in plan.steps:
        if writer.pool == pool:
            on_pool |= {*writer.writes}
    return not on_pool.isdisjoint(step.reads)


def _drawing(plan: Plan) -> Step:
    return next(step for step in plan.steps if step.unfinished and step.region)
