"""The goal *faster*: single changes that shorten an iteration, and generation that streams.

pools      devices moved from one to another; generation apart, ahead, streaming; all together; twice
engines    tensor-parallel sizes, SGLang, rows and tokens that generate at a time
passes     tokens of a micro-batch; activations kept or computed again; bfloat16
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from rlgraph.costs.hardware import Cluster
from rlgraph.errors import fail
from rlgraph.ir.plan import Plan
from rlgraph.search import goals
from rlgraph.search.candidate import Candidate
from rlgraph.search.evaluate import Evaluator
from rlgraph.search.moves import (
    Move,
    ahead,
    generates,
    scaled_serving,
    scaled_training,
    streaming,
    surplus_stays,
    with_pools,
)
from rlgraph.syntax.yaml_text import overrides
from rlgraph.units import middle

LEAST_SAVING = 0.02  # share of an iteration; a change that saves less is not worth a word
SPLITS = 4  # divisions of the devices in which streaming is tried


@dataclass(frozen=True)
class Improvement:
    """A setting to type, and the predicted time of an iteration then; ``saves`` is a share of it."""

    edits: tuple[str, ...]
    seconds: tuple[float, float]
    saves: float
    alters: str


@dataclass(frozen=True)
class Outlook:
    """Changes that help, the most helpful first; of how many; and the calibrated prediction without any."""

    seconds: tuple[float, float]
    tried: int
    changes: tuple[Improvement, ...]


def single_changes(evaluator: Evaluator, plan: Plan) -> Outlook:
    """Return the single changes that shorten an iteration, the best of each kind.

    Args:
        evaluator: of the graph.
        plan: its plan with everything settled, whose sizes are scaled.

    Raises:
        GraphError: the graph as it is can't be planned or does not fit.
    """
    cluster = evaluator.scenario.cluster
    unchanged = evaluator.candidate({})
    if unchanged.plan is None:
        raise fail("unplanned", unchanged.refusal, None)
    if not unchanged.fits:
        raise fail("does-not-fit", f"{plan.graph} does not fit on {cluster.cluster}", None)
    moves = [*single_moves(plan, cluster)]
    best: dict[str, Improvement] = {}
    for move in moves:
        changed = evaluator.candidate(move.settings)
        if not changed.fits:
            continue
        saves = round(1 - changed.seconds / unchanged.seconds, 4)
        if saves < LEAST_SAVING:
            continue
        rival = best.get(move.kind)
        if rival is None or saves > rival.saves:
            edits = tuple(overrides(move.settings))
            best[move.kind] = Improvement(edits, changed.prediction.seconds, saves, move.alters)
    ordered = sorted(best.values(), key=lambda improvement: -improvement.saves)
    return Outlook(unchanged.prediction.seconds, len(moves), tuple(ordered))


def single_moves(plan: Plan, cluster: Cluster) -> Iterator[Move]:
    """Yield the single changes of a plan that are worth a try on a cluster."""
    yield from _pool_moves(plan, cluster.total)
    on_gpus = cluster.device == "cuda"
    for name, model in plan.models.items():
        if model.serve:
            yield from scaled_serving(name, model, model.serve, on_gpus)
        if model.train:
            yield from scaled_training(name, model, model.train, on_gpus)


def _pool_moves(plan: Plan, most: int) -> Iterator[Move]:
    """Yield changes of pools: of their sizes, and of which there are."""
    pools = plan.pools
    total = sum(pools.values())
    if 2 * total <= most:
        doubled = {name: 2 * count for name, count in pools.items()}
        yield Move("devices", with_pools(doubled))
    for source, target in permutations(pools, 2):
        devices = pools[source]
        shares = {1, devices // 4, devices // 2} - {0, devices}
        for moved in sorted(shares):
            sizes = {**pools, source: devices - moved, target: pools[target] + moved}
            yield Move("pools", with_pools(sizes))
    if len(pools) > 1:
        yield from _moves_of_several_pools(plan, total)
    elif generates(plan):
        yield from _moves_of_one_pool(plan, total)


def _moves_of_several_pools(plan: Plan, total: int) -> Iterator[Move]:
    """Yield all devices in one pool, and generation that is ahead or streams on the pools that there are."""
    pool = next(iter(plan.pools))
    together = with_pools({pool: total})
    if plan.schedule.ahead:
        together["schedule.buffer"] = None
    yield Move("together", together)
    if plan.schedule.stream:
        return
    if not plan.schedule.ahead:
        yield ahead(plan, {})
    yield from streaming(plan, {})


def _moves_of_one_pool(plan: Plan, total: int) -> Iterator[Move]:
    """Yield generation on devices of its own: in turn with training, ahead of it, and streaming."""
    pool = next(iter(plan.pools))
    shares = {total // 4, total // 2, 3 * total // 4} - {0}
    for generating in sorted(shares):
        split = with_pools({pool: total - generating, "gen": generating})
        yield Move("apart", {**split, **surplus_stays(plan)})
        yield ahead(plan, split)
        yield from streaming(plan, split)


def streaming_offer(evaluator: Evaluator, layouts: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest plan that streams where it is faster than the best of some layouts, else None.

    A search of layouts leaves results as they are, and rows of older weights change them: so this is offered,
    with the corrections that it needs, and not taken. Tried are the layouts with generation apart whose
    busiest pool has the least to do.
    """
    enough = (1 - LEAST_SAVING) * layouts[0].seconds
    fast = []
    for layout in _least_busy(layouts):
        assert layout.plan
        for move in streaming(layout.plan, layout.settings):
            candidate = evaluator.candidate(move.settings)
            if candidate.fits and candidate.seconds < enough:
                fast.append(replace(candidate, layout=layout.layout, alters=move.alters))
    return min(fast, key=goals.faster, default=None)


def _least_busy(layouts: Sequence[Candidate]) -> list[Candidate]:
    """Return the best layout of each division of the devices, those with the least busy pools alone."""
    best: dict[int, Candidate] = {}
    for candidate in layouts:
        if candidate.layout is None or not candidate.fits:
            continue
        assert candidate.plan
        generating = candidate.layout.generating
        streams = candidate.plan.schedule.stream is not None
        if generating > 0 and not streams:
            best.setdefault(generating, candidate)
    return sorted(best.values(), key=_busiest_pool)[:SPLITS]


def _busiest_pool(candidate: Candidate) -> float:
    return max(map(middle, candidate.prediction.pools.values()))
