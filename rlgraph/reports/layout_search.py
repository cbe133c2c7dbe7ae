"""Search how a graph is best laid out on a cluster: pools, groups, micro-batches, what is computed again.

Only what leaves results as they are is tried: neither data types nor staleness. Every layout is planned and
priced in full, so that what wins is a plan, not an estimate of one:

    pools       all devices together, or training and generation apart; apart, each other model on either
    groups      tensor-parallel sizes of engines that have them
    micro       tokens of a micro-batch; activations kept or computed again
    offload     follows: rlgraph/planning/offload.py moves engines where a layout would not fit else

A first look over coarse splits, then a closer one around the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

from rlgraph.compiler import compile_graph, plan_tree
from rlgraph.costs.device_groups import GROUPS, has_groups
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.ir.plan import Plan, Target
from rlgraph.planning.predict import Scenario, predict
from rlgraph.syntax.source import flow
from rlgraph.units import middle, size_text

MICRO = (2048, 4096, 8192, 16384, 32768)
COARSE = 8  # parts in which the devices are first split

Settings = Mapping[str, Any]  # path in the graph -> value
PlanAttempt = Callable[[Settings], Plan]  # the priced plan of a graph with settings, or GraphError


@dataclass(frozen=True)
class PoolLayout:
    """One choice: devices that only generate (0: none), models beside them, groups, micro-batches."""

    generating: int
    beside: frozenset[str]  # scoring models and critics on the pool that generates
    group: int
    micro: int
    recompute: bool

    @property
    def family(self) -> str:
        """Return what it is called among others: how the devices are shared out."""
        if not self.generating:
            return "together"
        return f"apart, {' and '.join(sorted(self.beside))} with generation" if self.beside else "apart"

    def settings(self, plan: Plan, total: int) -> Settings:
        """Return what to set in the graph. Pools keep the names that it has, as far as it has two."""
        trains, generates = [*plan.pools, "gen"][:2] if self.generating else [next(iter(plan.pools))] * 2
        pools = {trains: total - self.generating} | ({generates: self.generating} if self.generating else {})
        found: dict[str, Any] = {"pools": {pool: {"devices": count} for pool, count in pools.items()}}
        for name, model in plan.models.items():
            if model.train:
                found[f"models.{name}.train.pool"] = generates if name in self.beside else trains
                found[f"models.{name}.train.micro_tokens"] = self.micro
            if model.train and model.optimizer:
                found[f"models.{name}.train.recompute"] = self.recompute
            if model.serve:
                found[f"models.{name}.serve.pool"] = generates
            if has_groups(model):
                found[f"models.{name}.serve.tensor_parallel"] = self.group
        return found


@dataclass(frozen=True)
class Candidate:
    """A layout and its plan, or why there is none. ``layout`` None: as the graph says."""

    layout: PoolLayout | None
    settings: Settings
    plan: Plan | None
    why_not: str = ""

    @cached_property
    def seconds(self) -> float:
        """The middle of what is predicted; without a plan for ever."""
        if self.plan is None or self.plan.predicted is None:
            return math.inf
        return middle(self.plan.predicted.seconds)

    @property
    def family(self) -> str:
        """Return what its layout is called among others."""
        return self.layout.family if self.layout else "as the graph says"

    @property
    def fits(self) -> bool:
        """Return whether no device holds more than it has."""
        peaks = (self.plan.peak or {}).values() if self.plan else ()
        return bool(peaks) and all(peak.fits for peak in peaks)

    @property
    def rank(self) -> tuple[bool, float, int, int]:
        """Return a sort key: what fits first, then the fastest, least moved, with the largest batches."""
        moves = sum(step.facts.moves == "off" for step in self.plan.steps) if self.plan else 0
        return not self.fits, self.seconds, moves, -self.layout.micro if self.layout else 0


def search(plan: Plan, total: int, per_host: int, attempt: PlanAttempt) -> list[Candidate]:
    """Every layout that was tried, the best first.

    Args:
        plan: the graph as it is, for its models.
        total: devices of the cluster.
        per_host: devices of one host, which bound a group.
        attempt: prices a graph with settings.
    """
    found = [_tried(None, {}, attempt)]
    coarse = max(total // COARSE, 1)
    splits = [0, *range(coarse, total, coarse)] if generates(plan) else [0]
    found += _all(layouts(plan, splits, per_host), plan, total, attempt)
    best = min(found, key=lambda candidate: candidate.rank).layout
    if best and best.generating:
        step = coarse // 2
        while step >= 1:
            near = [best.generating + move for move in (-step, step) if 0 < best.generating + move < total]
            found += _all([replace(best, generating=at) for at in near], plan, total, attempt)
            best = min((c for c in found if c.layout), key=lambda c: c.rank).layout or best
            step //= 2
    return sorted(found, key=lambda candidate: candidate.rank)


def layouts(plan: Plan, splits: Iterable[int], per_host: int) -> Iterator[PoolLayout]:
    """Every combination, for some numbers of devices that generate."""
    movable = [name for name, model in plan.models.items() if model.train and not model.serve]
    grouped = any(has_groups(model) for model in plan.models.values())
    groups = [size for size in GROUPS if per_host % size == 0] if grouped else [1]
    trains = any(model.optimizer and model.train for model in plan.models.values())
    for at, group, micro, again in product(splits, groups, MICRO, (False, True) if trains else (False,)):
        for count in range(len(movable) + 1) if at else (0,):
            for beside in combinations(movable, count):
                yield PoolLayout(at, frozenset(beside), group, micro, again)


def generates(plan: Plan) -> bool:
    """Return whether a model that trains generates, so that the two can be apart."""
    return any(model.serve and model.train for model in plan.models.values())


def _all(tried: Iterable[PoolLayout], plan: Plan, total: int, attempt: PlanAttempt) -> list[Candidate]:
    return [_tried(layout, layout.settings(plan, total), attempt) for layout in tried]


def _tried(layout: PoolLayout | None, settings: Settings, attempt: PlanAttempt) -> Candidate:
    try:
        plan = attempt(settings)
    except GraphError as error:
        return Candidate(layout, settings, None, error.problems[0].law)
    made = Candidate(layout, settings, plan)
    return made if made.fits else replace(made, why_not=_too_large(plan))


def _too_large(plan: Plan) -> str:
    pool, peak = max((plan.peak or {}).items(), key=lambda item: item[1].bytes - item[1].capacity)
    return f"{pool} needs {size_text(peak.bytes)} of {size_text(peak.capacity)} in `{peak.step}`"


def autoplace(graph: str, given: Sequence[str], target: Target) -> tuple[list[Candidate], Plan]:
    """All layouts of a graph on a cluster, the best first, and the plan of the best.

    Raises:
        GraphError: the graph is wrong, or no layout fits: then as the graph says it.
    """
    scenario = Scenario.of(target)
    cluster = scenario.cluster

    def planned(settings: Settings) -> Plan:
        tree = compose(graph, [*given, *overrides(settings)])
        return plan_tree(tree, cluster.total, cluster.device)

    def attempt(settings: Settings) -> Plan:
        return predict(planned(settings), scenario, must_fit=False)

    found = search(planned({}), cluster.total, cluster.devices, attempt)
    # where nothing fits, this refuses the graph as it is
    return found, compile_graph(graph, [*given, *overrides(found[0].settings)], target=target)


def overrides(settings: Settings) -> list[str]:
    """Settings as ``key=value``, as the command line takes them."""
    return [f"{path}={flow(value)}" for path, value in settings.items()]
