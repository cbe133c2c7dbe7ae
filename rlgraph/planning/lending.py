"""Lend the pool that trains to generation that streams, while it waits for rows.

    gen      ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
    train    update 1    ▇▇▇ ▇▇▇ ▇▇▇ update 2    ▇▇▇     rounds over some of what gen has begun

A step inserted behind the sync brings the weights, which are there, to an engine of the pool's own; the pool
is given back where the iteration collects its rows. So its memory is that of both, from the one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlgraph.engines.registry import serving
from rlgraph.errors import fail
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.renumber import surrounded, with_order
from rlgraph.ir.steps import NONE, Kind, Version

ASKED = "the graph asks for it (`schedule.stream.lend`)"


def lend_asked(plan: Plan) -> Plan:
    """Return the plan whose pool is lent where the graph says so.

    Raises:
        GraphError: it can't be.
    """
    stream = plan.schedule.stream
    if stream is None or stream.lend is not True:
        return plan
    if reason := unfit(plan):
        law = f"`schedule.stream.lend: true`, and {reason}"
        raise fail("no-lend", law, None, remedy="set: {schedule.stream.lend: false}")
    return lent(plan, ASKED)


def lent(plan: Plan, because: str) -> Plan:
    """Return the plan with the step that lends the pool on which the model that streams trains."""
    drawing = _drawing(plan)
    collect = next(step for step in plan.steps if step.facts.collects and step.region == drawing.region)
    sync = next(step for step in plan.steps if step.facts.syncs and step.models.keys() & drawing.models.keys())
    pool = lender(plan)
    step = replace(
        sync,
        id=len(plan.steps) + 1,
        kind=Kind.LEND,
        node=f"lend:{pool}",
        pool=pool,
        devices=tuple(range(plan.pools[pool])),
        because=because,
        after=(sync.id,),
        source="",
        path="memory",
    )
    around = {collect.id: ([step], ())}
    slot = surrounded([plan.steps[number - 1] for number in plan.slot], around)
    return with_order(plan, surrounded(plan.steps, around), [step.id for step in slot])


def lender(plan: Plan) -> str:
    """Return the pool on which the model that streams trains."""
    train = plan.models[next(iter(_drawing(plan).models))].train
    assert train
    return train.pool


def unfit(plan: Plan) -> str:
    """Return why the pool that trains can't be lent, whatever its devices hold; "" where it can."""
    drawing, stream = _drawing(plan), plan.schedule.stream
    serve = plan.models[next(iter(drawing.models))].serve
    assert serve and stream
    if not serving(serve).lent:
        return f"the engine {serve.engine} has samples in flight between rounds, and can't be given back"
    if stream.order == "in_order":
        return "`order: in_order` repeats to the bit, while which pool draws a sample depends on time"
    others = [s for s in plan.steps if s.region == drawing.region and s.pool == drawing.pool and s.engine]
    if other := next((step for step in others if step is not drawing), None):
        return f"`{other.node}` measures what is drawn with an engine that is on pool {drawing.pool} alone"
    return ""


def _drawing(plan: Plan) -> Step:
    return next(step for step in plan.steps if step.leaves and plan.regions[step.region].streams)
