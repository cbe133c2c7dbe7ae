"""The part of a plan that a region repeats: its steps, its pools, and how its rounds are drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rlgraph.ir.actions import Collect, MoveEngine
from rlgraph.ir.graph import Region
from rlgraph.ir.plan import Plan, Step
from rlgraph.syntax.settings import Buffer


@dataclass(frozen=True)
class RegionPlan:
    """The part of a plan that rounds of one region repeat.

    Of a refill a round is drawn when its last step is: all its steps go to their pools at once.
    """

    region: Region
    stream: Buffer | None  # the schedule of a region that streams; None: a refill
    steps: tuple[Step, ...]  # of a round
    collect: Step  # gathers what the filter keeps
    rollout: Step | None  # may leave samples unfinished
    drawing_steps: int  # how many steps there are up to the samples
    in_turn: frozenset[int]  # numbers of steps that pools take in order
    home: str  # the pool that draws samples
    lender: str  # a pool that is lent to it while an iteration waits; "": none
    pools: frozenset[str]  # that get nothing else until an iteration has its rows
    urgent_pools: frozenset[str]  # on which rounds come before the steps that wait
    models: frozenset[str]  # that generate
    sizes: Mapping[str, int]  # devices of each pool
    moves_samples: bool  # whether each round says what a worker has drawn, from which another can go on

    @staticmethod
    def of(plan: Plan, name: str) -> RegionPlan:
        """Return what a plan says of the region behind a filter."""
        region = plan.regions[name]
        stream = plan.schedule.stream if region.streams else None
        region_steps = [step for step in plan.steps if step.region == name]
        steps = tuple(step for step in region_steps if not isinstance(step.action, Collect))
        collect = next(step for step in region_steps if isinstance(step.action, Collect))
        rollout = next((step for step in steps if step.unfinished), None)
        models = set[str]()  # that generate
        for step in steps:
            if step.generates:
                models |= step.models.keys()
        pools = set[str]()
        for step in region_steps:
            pools |= {step.pool, step.source} - {""}
        drawing_steps = len(steps)
        urgent_pools = pools
        lender = ""
        moves_samples = False
        if stream:
            assert rollout
            drawing_steps = 1 + steps.index(rollout)
            lender = _lender(plan, models)
            pools = {collect.pool}
            urgent_pools = {lender}
            attributes = plan.functions["train"][rollout.node].attributes
            moves_samples = bool(attributes.get("stays", False))
        moves_engines = any(isinstance(step.action, MoveEngine) for step in steps)
        turns = steps if moves_engines else steps[:drawing_steps]
        return RegionPlan(
            region=region,
            stream=stream,
            steps=steps,
            collect=collect,
            rollout=rollout,
            drawing_steps=drawing_steps,
            in_turn=frozenset(step.id for step in turns),
            home=(rollout or steps[-1]).pool,
            lender=lender,
            pools=frozenset(pools),
            urgent_pools=frozenset(urgent_pools),
            models=frozenset(models),
            sizes=plan.pools,
            moves_samples=moves_samples,
        )


def _lender(plan: Plan, models: Collection[str]) -> str:
    """Return the pool that the plan lends to some models, or ""."""
    for pool, step in plan.lenders.items():
        if not step.models.keys().isdisjoint(models):
            return pool
    return ""
