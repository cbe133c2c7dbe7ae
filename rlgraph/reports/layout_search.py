"""Search how a graph is best laid out on a cluster: pools, groups, micro-batches, what is computed again.

Only what leaves results as they are is tried: neither data types nor staleness. Every layout is planned and
priced in full, so that what wins is a plan, not an estimate of one:

    pools       all devices together, or training and generation apart; apart, each other model on either
    groups      tensor-parallel sizes of engines that have them
    micro       tokens of a micro-batch; activations kept or computed again
    host        where nothing fits: optimizers on the host, then activations too
    mesh        of the best: models sharded over one host or several, in replicas, rather than all devices
    sequence    then: the tokens of each row shared by devices of a host; where nothing fits, of several too
    divided     then: experts of mixtures divided among devices of a host; last, layers of other models
    offload     follows: rlgraph/planning/offload.py moves engines where a layout would not fit else

A first look over coarse splits, then a closer one around the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, groupby, product

from rlgraph.compiler import compile_graph, plan_tree
from rlgraph.costs.hardware import Cluster
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import as_written, overridden
from rlgraph.ir.plan import Origin, Plan, Target
from rlgraph.planning.device_groups import GROUPS, has_groups, on_whole_hosts, sharing_sizes
from rlgraph.planning.model_limits import dividing, sharing
from rlgraph.planning.predict import Scenario, predict
from rlgraph.reports.layout import HOST, PoolLayout, Settings
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.yaml_text import flow
from rlgraph.units import middle, size_text
from rlgraph.version import VERSION

MICRO = (2048, 4096, 8192, 16384, 32768)
COARSE = 8  # parts in which the devices are first split
PlanAttempt = Callable[[Settings], Plan]  # the plan of a graph with settings, or GraphError


@dataclass(frozen=True)
class Candidate:
    """A layout and its plan, or why there is none. ``layout`` None: as the graph says."""

    layout: PoolLayout | None
    settings: Settings
    plan: Plan | None
    why_not: str = ""

    @cached_property
    def seconds(self) -> float:
        """Return the middle of what is predicted; without a plan infinity."""
        return middle(self.plan.predicted.seconds) if self.plan and self.plan.predicted else math.inf

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
    def lacks(self) -> float:
        """Return the bytes that its fullest device has too few of; without a plan infinity."""
        peaks = (self.plan.peak or {}).values() if self.plan else ()
        return max((float(peak.lacks) for peak in peaks), default=math.inf)

    @property
    def rank(self) -> tuple[bool, float, int, int]:
        """Return a sort key: what fits first, then the fastest, or what lacks the least memory; then
        the least moved, with the largest batches."""
        cost = self.seconds if self.fits else self.lacks
        moves = sum(step.facts.moves == "off" for step in self.plan.steps) if self.plan else 0
        return not self.fits, cost, moves, -self.layout.micro if self.layout else 0


def search(plan: Plan, total: int, per_host: int, attempt: PlanAttempt, row: float = 0) -> list[Candidate]:
    """Return every layout that was tried, the best first.

    Args:
        plan: the graph as it is, for its models.
        total: devices of the cluster.
        per_host: devices of one host, which bound a group.
        attempt: prices a graph with settings.
        row: tokens of a row, as far as is known: smaller micro-batches are all alike, one row each.
    """
    tried = [_tried(None, {}, attempt)]
    coarse = max(total // COARSE, 1)
    splits = [0, *range(coarse, total, coarse)] if generates(plan) else [0]
    for host in HOST:
        if not host or (plan.device == "cuda" and not any(candidate.fits for candidate in tried)):
            again = (replace(layout, host=host) for layout in layouts(plan, splits, per_host, row))
            tried += _all(again, plan, total, attempt)
    best = min(tried, key=lambda candidate: candidate.rank).layout
    step = coarse // 2 if best and best.generating else 0
    while best and step:
        near = [best.generating + move for move in (-step, step) if 0 < best.generating + move < total]
        tried += _all([replace(best, generating=at) for at in near], plan, total, attempt)
        best = _best_layout(tried)
        step //= 2
    if best := _best_layout(tried):
        tried += _all(meshes(plan, best, total, per_host, row), plan, total, attempt)
    # where nothing fits, it is not known which of the splits long rows leave the best
    fits = any(candidate.fits for candidate in tried)
    for at in (None,) if fits else splits:
        if best := _best_layout(tried, at):  # what shares rows may need less on the host
            for host in [*HOST][: [*HOST].index(best.host) + 1]:
                lighter, most = replace(best, host=host), per_host if fits else total
                more = sequences(plan, lighter, per_host, min(most, total - best.generating), row)
                tried = _doubled(tried, more, plan, total, attempt)
        if best := _best_layout(tried, at):
            more = divisions(plan, best, "expert_parallel", per_host, row)
            tried = _doubled(tried, more, plan, total, attempt)
    if best := _best_layout(tried):
        whole = replace(best, sequence=None, shard=None)  # who divides layers shares no rows
        more = divisions(plan, whole, "tensor_parallel", per_host, row)
        tried = _doubled(tried, more, plan, total, attempt)
    return sorted(tried, key=lambda candidate: candidate.rank)


def _doubled(
    tried: list[Candidate], more: Iterable[PoolLayout], plan: Plan, total: int, attempt: PlanAttempt
) -> list[Candidate]:
    """Return what was tried and more layouts, in which ever more devices share rows or divide a model.

    With each doubling a device computes or holds half as much, and sends more instead. So where a doubling
    fits and is no gain, no further one is tried, unless the graph itself asks for several devices: of those
    that keep activations, which may fit later, and of those that compute them again, each by itself.
    """
    asked, done = False, set[bool]()
    for ways, alike in groupby(more, key=lambda layout: layout.ways):
        asked |= ways == 1
        before = min(candidate.rank for candidate in tried)
        even = [layout for layout in alike if not any(count % ways for count in layout.trained(total))]
        doubled = _all((layout for layout in even if layout.recompute not in done), plan, total, attempt)
        tried = [*tried, *doubled]
        if not asked and min(candidate.rank for candidate in tried) == before:
            done |= {one.layout.recompute for one in doubled if one.layout and one.fits}
    return tried


def _best_layout(tried: Iterable[Candidate], generating: int | None = None) -> PoolLayout | None:
    """Return the best layout other than the graph's own; of those with so many devices that generate."""
    laid_out = [c for c in tried if c.layout and generating in (None, c.layout.generating)]
    return min(laid_out, key=lambda candidate: candidate.rank).layout if laid_out else None


def layouts(plan: Plan, splits: Iterable[int], per_host: int, row: float = 0) -> Iterator[PoolLayout]:
    """Yield every combination, for some numbers of devices that generate."""
    movable = [name for name, model in plan.models.items() if model.train and not model.serve]
    grouped = any(has_groups(model) for model in plan.models.values())
    groups = [size for size in GROUPS if per_host % size == 0] if grouped else [1]
    for at, group, micro, again in product(splits, groups, unlike(row), _recomputing(plan)):
        for count in range(len(movable) + 1) if at else (0,):
            for beside in combinations(movable, count):
                yield PoolLayout(at, frozenset(beside), group, micro, again)


def unlike(row: float, ranks: int = 1) -> list[int]:
    """Return the micro-batches to try on devices that share a row's tokens: of those in which no row of so
    many tokens has room, and which take one each, the largest alone.

    Example:
        >>> unlike(10_000), unlike(10_000, ranks=2)
        ([8192, 16384, 32768], [8192, 16384, 32768, 65536])
    """
    sizes = [ranks * micro for micro in MICRO]
    return [size for size, larger in zip(sizes, [*sizes[1:], math.inf], strict=True) if larger > row]


def meshes(plan: Plan, best: PoolLayout, total: int, per_host: int, row: float = 0) -> Iterator[PoolLayout]:
    """Yield the best layout with replicas of its models, each on whole hosts, and other micro-batches; where
    the graph asks for replicas, with one copy too."""
    devices, shard = total - best.generating, per_host
    sizes = [devices] * any(model.train and model.train.shard for model in plan.models.values())
    while shard < devices:
        sizes += [shard] * (devices % shard == 0)
        shard *= 2
    for size, micro, again in product(sizes, unlike(row), _recomputing(plan)):
        yield replace(best, micro=micro, recompute=again, shard=size)


def sequences(plan: Plan, best: PoolLayout, per_host: int, most: int, row: float = 0) -> Iterator[PoolLayout]:
    """Yield the best layout with rows that at ``most`` so many devices share, and micro-batches as large
    on each; where the graph asks for such rows, with rows on one device too."""
    trains = [model.train for model in plan.models.values() if model.train]
    sizes = [1] * any(train.sequence_parallel > 1 for train in trains)
    sizes += [size for size in sharing_sizes(plan, per_host) if sharing(plan) and size <= most]
    for size, recompute in product(sizes, _recomputing(plan)):
        for micro in unlike(row, size):
            yield replace(best, micro=micro, recompute=recompute, sequence=size)


def divisions(
    plan: Plan, best: PoolLayout, setting: str, per_host: int, row: float = 0
) -> Iterator[PoolLayout]:
    """Yield the best layout with experts, or layers, that devices of a host divide, and other micro-batches;
    where the graph asks for that, with all of them on each device too."""
    trains = [model.train for model in plan.models.values() if model.train]
    sizes = [1] * any(getattr(train, setting) > 1 for train in trains)
    sizes += [size for size in GROUPS[1:] if per_host % size == 0 and dividing(plan, setting, size)]
    micros = unlike(row, best.sequence or 1)
    for size, micro, recompute in product(sizes, micros, _recomputing(plan)):
        yield replace(best, micro=micro, recompute=recompute, divided=(setting, size))


def _recomputing(plan: Plan) -> list[bool]:
    return [False] + [True] * any(model.optimizer and model.train for model in plan.models.values())


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
    candidate = Candidate(layout, settings, plan)
    if candidate.fits:
        return candidate
    pool, peak = max((plan.peak or {}).items(), key=lambda item: item[1].lacks)
    needs = f"{pool} needs {size_text(peak.bytes)} of {size_text(peak.capacity)} in `{peak.step}`"
    return replace(candidate, why_not=needs)


def autoplace(graph: str, given: Sequence[str], target: Target) -> tuple[list[Candidate], Plan]:
    """Return all layouts of a graph on a cluster, the best first, and the plan of the best.

    Raises:
        GraphError: the graph is wrong, or no layout fits: then as the graph says it.
    """
    scenario = Scenario.of(target)
    cluster, planned = scenario.cluster, planner(graph, given, target, scenario.cluster)

    def attempt(settings: Settings) -> Plan:
        return on_whole_hosts(predict(planned(settings), scenario, must_fit=False), cluster)

    plan = planned({})
    row = scenario.work(plan).mean
    candidates = search(plan, cluster.total, cluster.devices, attempt, row)
    settings = candidates[0].settings if candidates[0].fits else {}  # the graph as it is, which is refused
    return candidates, compile_graph(graph, [*given, *overrides(settings)], target=target)


def planner(graph: str, given: Sequence[str], target: Target, cluster: Cluster) -> PlanAttempt:
    """Return what plans a graph with settings for all devices of a cluster, and does not price it."""
    written = as_written(graph, given)

    def planned(settings: Settings) -> Plan:
        chosen = overrides(settings)
        tree = interpolate(overridden(written, chosen))
        plan, composed = plan_tree(tree, cluster.total, cluster.device), tree.written().plain()
        origin = Origin(graph, (*given, *chosen), cluster.total, VERSION, composed, target)
        return replace(plan, origin=origin)

    return planned


def overrides(settings: Settings) -> list[str]:
    """Return settings as ``key=value``, as the command line takes them."""
    return [f"{path}={flow(value)}" for path, value in settings.items()]
