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
    Settings,
    ahead,
    generates,
    overrides,
    scaled_serving,
    scaled_training,
    streaming,
    surplus_stays,
    with_pools,
)
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
    before = evaluator.candidate({})
    if before.plan is None:
        raise fail("unplanned", before.refusal, None)
    if not before.fits:
        raise fail("does-not-fit", f"{plan.graph} does not fit on {cluster.cluster}", None)
    moves = [*single_moves(plan, cluster)]
    best: dict[str, Improvement] = {}
    for move in moves:
        after = evaluator.candidate(move.settings)
        saves = round(1 - after.seconds / before.seconds, 4)
        if not after.fits or saves < LEAST_SAVING:
            continue
        if move.kind not in best or saves > best[move.kind].saves:
            edits = tuple(overrides(move.settings))
            best[move.kind] = Improvement(edits, after.prediction.seconds, saves, move.alters)
    ordered = sorted(best.values(), key=lambda improvement: -improvement.saves)
    return Outlook(before.prediction.seconds, len(moves), tuple(ordered))


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
    pools = plan.pools
    total, names = sum(pools.values()), list(pools)
    if 2 * total <= most:
        yield Move("devices", with_pools({name: 2 * count for name, count in pools.items()}))
    for source, target in permutations(names, 2):
        for moved in sorted({1, pools[source] // 4, pools[source] // 2} - {0, pools[source]}):
            sizes = {**pools, source: pools[source] - moved, target: pools[target] + moved}
            yield Move("pools", with_pools(sizes))
    if len(names) > 1:
        together: Settings = with_pools({names[0]: total})
        if plan.schedule.ahead:
            together = {**together, "schedule.buffer": None}
        yield Move("together", together)
        if not plan.schedule.stream:
            if not plan.schedule.ahead:
                yield ahead(plan, {})
            yield from streaming(plan, {})
    elif generates(plan):
        for generating in sorted({total // 4, total // 2, 3 * total // 4} - {0}):
            split = with_pools({names[0]: total - generating, "gen": generating})
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
    streamed = []
    for layout in _least_busy(layouts):
        assert layout.plan
        for move in streaming(layout.plan, layout.settings):
            candidate = evaluator.candidate(move.settings)
            streamed.append(replace(candidate, layout=layout.layout, alters=move.alters))
    fast = [candidate for candidate in streamed if candidate.fits and candidate.seconds < enough]
    return min(fast, key=goals.faster, default=None)


def _least_busy(layouts: Sequence[Candidate]) -> list[Candidate]:
    """Return the best layout of each division of the devices, those with the least busy pools alone."""
    best: dict[int, Candidate] = {}
    for candidate in layouts:
        layout = candidate.layout
        if not candidate.fits or layout is None or not layout.generating:
            continue
        assert candidate.plan
        if candidate.plan.schedule.stream is None:
            best.setdefault(layout.generating, candidate)
    return sorted(best.values(), key=_busiest_pool)[:SPLITS]


def _busiest_pool(candidate: Candidate) -> float:
    return max(map(middle, candidate.prediction.pools.values()))
