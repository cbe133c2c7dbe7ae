"""The goal *fit* over layouts: how a graph is best laid out on a cluster.

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

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, groupby, product

from rlgraph.ir.plan import Plan, TrainPlan
from rlgraph.planning.device_groups import has_groups, sharing_sizes
from rlgraph.planning.model_limits import sharing
from rlgraph.search import goals
from rlgraph.search.candidate import Candidate
from rlgraph.search.evaluate import Evaluator
from rlgraph.search.layout import HOST, PoolLayout
from rlgraph.search.moves import Settings, division_sizes, generates, group_sizes

MICRO = (2048, 4096, 8192, 16384, 32768)
COARSE = 8  # parts in which the devices are first split

Evaluate = Callable[[Settings], Candidate]
ReportProgress = Callable[[int, int], None]  # takes how many layouts were tried, of how many that are known


def silent(tried: int, known: int) -> None:
    """Report nothing about a search."""


def best_layouts(evaluator: Evaluator, report: ReportProgress = silent) -> list[Candidate]:
    """Return all layouts of a graph on its cluster that were tried, the best first.

    ``report`` is told after each layout how far the search is.

    Raises:
        GraphError: the graph is wrong.
    """
    plan = evaluator.plan({})
    cluster = evaluator.scenario.cluster
    row = evaluator.scenario.work(plan).mean
    return search(plan, cluster.total, cluster.devices, evaluator.candidate, row, report)


def search(
    plan: Plan,
    total: int,
    per_host: int,
    evaluate: Evaluate,
    row: float = 0,
    report: ReportProgress = silent,
) -> list[Candidate]:
    """Return every layout that was tried, the best first.

    Args:
        plan: the graph as it is, for its models.
        total: devices of the cluster.
        per_host: devices of one host, which bound a group.
        evaluate: plans and prices the graph with settings.
        row: tokens of a row, as far as is known: smaller micro-batches are all alike, one row each.
        report: is told after each layout how far the search is.
    """
    layouts = LayoutSearch(plan, total, per_host, evaluate, row, report)
    splits = [0]
    if generates(plan):
        splits += range(layouts.coarse, total, layouts.coarse)
    layouts.try_splits(splits)
    layouts.try_closer_splits()
    layouts.try_meshes()
    layouts.try_shared_rows_and_experts(splits)
    layouts.try_divided_layers()
    return sorted(layouts.tried, key=goals.fit)


class LayoutSearch:
    """The layouts that were tried so far, and the neighbourhoods of the best of them.

    Invariants:
        - ``tried`` begins with the graph as it is, and only grows.
        - Each step starts at the best layout of all that were tried before it.
    """

    def __init__(
        self,
        plan: Plan,
        total: int,
        per_host: int,
        evaluate: Evaluate,
        row: float,
        report: ReportProgress = silent,
    ) -> None:
        self.plan = plan
        self.total = total
        self.per_host = per_host
        self.evaluate = evaluate
        self.row = row
        self.report = report
        self.coarse = max(total // COARSE, 1)
        self.tried = [evaluate({})]

    @property
    def something_fits(self) -> bool:
        """Return whether a layout that was tried, or the graph as it is, fits."""
        return any(candidate.fits for candidate in self.tried)

    def best(self, generating: int | None = None) -> PoolLayout | None:
        """Return the best layout other than the graph's own; of those with so many devices that generate."""
        candidates = []
        for candidate in self.tried:
            if candidate.layout is None:
                continue
            if generating is None or candidate.layout.generating == generating:
                candidates.append(candidate)
        if not candidates:
            return None
        return min(candidates, key=goals.fit).layout

    def try_all(self, layouts: Iterable[PoolLayout]) -> list[Candidate]:
        """Try some layouts, and return them as candidates."""
        candidates: list[Candidate] = []
        choices = [*layouts]
        for layout in choices:
            candidate = self.evaluate(layout.settings(self.plan, self.total))
            candidates.append(replace(candidate, layout=layout))
            self.report(len(self.tried) + len(candidates), len(self.tried) + len(choices))
        self.tried += candidates
        return candidates

    def try_splits(self, splits: Iterable[int]) -> None:
        """Try all combinations of pools, groups and micro-batches; on the host only what has to be there."""
        hosts = [""]
        if self.plan.device == "cuda":  # a CPU's memory is the host's
            hosts = list(HOST)
        for host in hosts:
            if host and self.something_fits:
                return
            choices = layouts(self.plan, splits, self.per_host, self.row)
            self.try_all(replace(layout, host=host) for layout in choices)

    def try_closer_splits(self) -> None:
        """Try splits between the coarse ones, ever closer to the best."""
        best = min(self.tried, key=goals.fit).layout
        if best is None or not best.generating:
            return
        step = self.coarse // 2
        while step:
            for split in (best.generating - step, best.generating + step):
                if 0 < split < self.total:
                    self.try_all([replace(best, generating=split)])
            best = self.best()
            assert best
            step //= 2

    def try_meshes(self) -> None:
        """Try replicas of the models that train."""
        best = self.best()
        if best:
            self.try_all(meshes(self.plan, best, self.total, self.per_host, self.row))

    def try_shared_rows_and_experts(self, splits: Iterable[int]) -> None:
        """Try devices that share rows, then devices that divide experts.

        Where nothing fits, it is not known which of the splits long rows leave the best: all are tried.
        """
        if self.something_fits:
            self.try_shared_rows(None, self.per_host)
            self.try_divided_experts(None)
            return
        for split in splits:
            self.try_shared_rows(split, self.total)
            self.try_divided_experts(split)

    def try_shared_rows(self, split: int | None, most: int) -> None:
        """Try rows that at ``most`` so many devices share, on the best layout of a split."""
        best = self.best(split)
        if best is None:
            return
        most = min(most, self.total - best.generating)
        kinds = list(HOST)
        for host in kinds[: kinds.index(best.host) + 1]:  # what shares rows may need less on the host
            lighter = replace(best, host=host)
            self.try_doublings(sequences(self.plan, lighter, self.per_host, most, self.row))

    def try_divided_experts(self, split: int | None) -> None:
        """Try experts that devices divide, on the best layout of a split."""
        best = self.best(split)
        if best:
            self.try_doublings(divisions(self.plan, best, "expert_parallel", self.per_host, self.row))

    def try_divided_layers(self) -> None:
        """Try devices that divide layers; those share no rows."""
        best = self.best()
        if best:
            start = replace(best, sequence=None, shard=None)
            self.try_doublings(divisions(self.plan, start, "tensor_parallel", self.per_host, self.row))

    def try_doublings(self, layouts: Iterable[PoolLayout]) -> None:
        """Try layouts in which ever more devices share rows or divide a model.

        With each doubling a device computes or holds half as much, and sends more instead. So where a
        doubling fits and is no gain, no further one is tried, unless the graph itself asks for several
        devices: of those that keep activations, which may fit later, and of those that compute them again,
        each by itself.
        """
        graph_has_several = False
        finished: set[bool] = set()  # whether activations are computed again
        for ways, choices in groupby(layouts, key=lambda layout: layout.ways):
            if ways == 1:  # it is only tried where the graph itself has several
                graph_has_several = True
            doubled = []
            for layout in choices:
                if layout.recompute not in finished and self._divides_pools(layout):
                    doubled.append(layout)
            rank = self.best_rank
            candidates = self.try_all(doubled)
            is_gain = self.best_rank < rank
            if graph_has_several or is_gain:
                continue
            for candidate in candidates:
                if candidate.fits:
                    assert candidate.layout
                    finished.add(candidate.layout.recompute)

    @property
    def best_rank(self) -> tuple[bool, float, int, int]:
        """The sort key of the best that was tried."""
        return min(map(goals.fit, self.tried))

    def _divides_pools(self, layout: PoolLayout) -> bool:
        """Return whether the devices that share something divide each pool that trains."""
        pools = layout.training_pools(self.total)
        return all(devices % layout.ways == 0 for devices in pools)


def layouts(plan: Plan, splits: Iterable[int], per_host: int, row: float = 0) -> Iterator[PoolLayout]:
    """Yield every combination, for some numbers of devices that generate."""
    groups = [1]
    if any(map(has_groups, plan.models.values())):
        groups = group_sizes(per_host)
    for split, group, micro, recompute in product(splits, groups, micro_batches(row), _recompute(plan)):
        for scorers in _scorers(plan, split):
            yield PoolLayout(split, scorers, group, micro, recompute)


def _scorers(plan: Plan, split: int) -> list[frozenset[str]]:
    """Return the choices of models that only score, or criticize, to put on the pool that generates."""
    if not split:
        return [frozenset()]
    movable = [name for name, model in plan.models.items() if model.train and not model.serve]
    subsets: list[frozenset[str]] = []
    for count in range(len(movable) + 1):
        subsets += map(frozenset, combinations(movable, count))
    return subsets


def micro_batches(row: float, ranks: int = 1) -> list[int]:
    """Return the micro-batches to try on devices that share a row's tokens: of those in which no row of so
    many tokens has room, and which take one each, the largest alone.

    Example:
        >>> micro_batches(10_000), micro_batches(10_000, ranks=2)
        ([8192, 16384, 32768], [8192, 16384, 32768, 65536])
    """
    sizes = [ranks * micro for micro in MICRO]
    too_small = bisect_right(sizes, row)  # for a row
    return sizes[max(too_small - 1, 0) :]


def meshes(plan: Plan, best: PoolLayout, total: int, per_host: int, row: float = 0) -> Iterator[PoolLayout]:
    """Yield the best layout with replicas of its models, each on whole hosts, and other micro-batches; where
    the graph asks for replicas, with one copy too."""
    devices = total - best.generating
    sizes = []
    if any(train.shard for train in _train_settings(plan)):
        sizes.append(devices)
    shard = per_host
    while shard < devices:
        if devices % shard == 0:
            sizes.append(shard)
        shard *= 2
    for size, micro, recompute in product(sizes, micro_batches(row), _recompute(plan)):
        yield replace(best, micro=micro, recompute=recompute, shard=size)


def sequences(plan: Plan, best: PoolLayout, per_host: int, most: int, row: float = 0) -> Iterator[PoolLayout]:
    """Yield the best layout with rows that at ``most`` so many devices share, and micro-batches as large
    on each; where the graph asks for such rows, with rows on one device too."""
    sizes = []
    if any(train.sequence_parallel > 1 for train in _train_settings(plan)):
        sizes.append(1)
    if sharing(plan):
        sizes += [size for size in sharing_sizes(plan, per_host) if size <= most]
    for size, recompute in product(sizes, _recompute(plan)):
        for micro in micro_batches(row, size):
            yield replace(best, micro=micro, recompute=recompute, sequence=size)


def divisions(
    plan: Plan, best: PoolLayout, setting: str, per_host: int, row: float = 0
) -> Iterator[PoolLayout]:
    """Yield the best layout with experts, or layers, that devices of a host divide, and other micro-batches;
    where the graph asks for that, with all of them on each device too."""
    sizes = []
    if any(getattr(train, setting) > 1 for train in _train_settings(plan)):
        sizes.append(1)
    sizes += division_sizes(plan, setting, per_host)
    micros = micro_batches(row, best.sequence or 1)
    for size, micro, recompute in product(sizes, micros, _recompute(plan)):
        yield replace(best, micro=micro, recompute=recompute, divided=(setting, size))


def _train_settings(plan: Plan) -> list[TrainPlan]:
    return [model.train for model in plan.models.values() if model.train]


def _recompute(plan: Plan) -> list[bool]:
    """Return the choices of keeping activations or computing them again; what is frozen has no choice."""
    for model in plan.models.values():
        if model.train and model.optimizer:
            return [False, True]
    return [False]
