"""Changes that would shorten iterations: each by itself is planned and priced as the plan itself is.

The cost model is calibrated on the run first, so that a gain is one of its machine. Tried are, one at a time:

    pools      devices moved from one to another; generation apart, ahead, streaming; all together; twice
    engines    tensor-parallel sizes, SGLang, rows and tokens that generate at a time
    passes     tokens of a micro-batch; activations kept or computed again; bfloat16

The graph is planned again for each, from the files that the run was made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations
from typing import Any

from rlgraph.compiler import plan_tree
from rlgraph.costs.calibration import Calibration, fit
from rlgraph.engines.registry import EMBEDDED, SERVERS
from rlgraph.errors import GraphError, fail
from rlgraph.frontend.compose import compose
from rlgraph.ir.plan import ModelPlan, Plan
from rlgraph.planning.auto_settings import as_planned, fixed
from rlgraph.planning.device_groups import GROUPS, has_groups
from rlgraph.planning.predict import Scenario, predict
from rlgraph.reports.layout import Settings
from rlgraph.reports.layout_search import generates, overrides
from rlgraph.reports.measured import MetricsLine, Priced, measured_work
from rlgraph.units import middle

LEAST = 0.02  # a change that saves a smaller share of an iteration is not worth a word
FACTORS = (0.25, 0.5, 2, 4)
AHEAD = "rows are one version old, and the ratio is to the weights that sampled them"
STREAM = "rows are of several versions, the oldest {k} updates old, and the loss corrects for it"
NARROW = "computes in bfloat16"


@dataclass(frozen=True)
class Try:
    """A change before it is priced. Of those of one ``kind`` the best is told."""

    kind: str
    settings: Settings
    alters: str = ""  # what it does to results, if anything


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


def outlook(priced: Priced, lines: Sequence[MetricsLine]) -> Outlook:
    """Return the changes that shorten an iteration of a run, as the cost model has it from timed iterations.

    Raises:
        GraphError: the run's own graph can't be planned here any more.
    """
    factors = calibrated(priced, lines)
    before = _planned(priced, lines, factors, {})
    best: dict[str, Improvement] = {}
    tries = [*_tries(priced)]
    for one in tries:
        try:
            seconds = _planned(priced, lines, factors, one.settings)
        except GraphError:  # the graph does not allow it, or it does not fit
            continue
        saves = 1 - middle(seconds) / middle(before)
        change = Improvement(tuple(overrides(one.settings)), seconds, round(saves, 4), one.alters)
        if saves >= LEAST and (one.kind not in best or saves > best[one.kind].saves):
            best[one.kind] = change
    ordered = sorted(best.values(), key=lambda change: -change.saves)
    return Outlook(before, len(tries), tuple(ordered))


def calibrated(priced: Priced, lines: Sequence[MetricsLine]) -> Calibration:
    """Return factors for each kind of work: the spread of its measured over its predicted seconds."""
    ratios = {kind: [*chain(*steps.values())] for kind, steps in priced.ratios(lines).items()}
    factors = {kind: [*fit(of_kind)] for kind, of_kind in ratios.items()}
    return Calibration(calibration=str(priced.run_dir), **factors)


def _planned(
    priced: Priced, lines: Sequence[MetricsLine], factors: Calibration, settings: Settings
) -> tuple[float, float]:
    """Return the seconds of an iteration with these settings."""
    origin = priced.plan.origin
    assert origin
    tree = compose(origin.graph, [*origin.overrides, *overrides(settings)])
    plan = plan_tree(as_planned(tree, priced.plan), origin.devices, priced.plan.device)
    if not settings and plan.digest != priced.plan.digest:
        raise fail("changed", f"{origin.graph} has changed since the run", None)
    if origin.target is None:
        plan = fixed(plan)  # a run without a cluster would have this plan again
    said = measured_work(origin.target, lines, priced.prompt_tokens)
    planned = predict(plan, Scenario(priced.cluster, said, factors), must_fit=False)
    assert planned.peak and planned.predicted
    if not all(pool.fits for pool in planned.peak.values()):
        raise fail("does-not-fit", f"{plan.graph} does not fit on {priced.cluster.cluster}", None)
    return planned.predicted.seconds


def _tries(priced: Priced) -> Iterator[Try]:
    gpus = priced.cluster.device == "cuda"
    yield from _pools(priced.plan, priced.cluster.total)
    for name, model in priced.plan.models.items():
        yield from _serving(name, model, gpus) if model.serve else ()
        yield from _passing(name, model, gpus) if model.train else ()


def _pools(plan: Plan, most: int) -> Iterator[Try]:
    total, names = sum(plan.pools.values()), [*plan.pools]
    if 2 * total <= most:
        yield Try("devices", _sized({name: 2 * count for name, count in plan.pools.items()}))
    for a, b in permutations(names, 2):
        for moved in sorted({1, plan.pools[a] // 4, plan.pools[a] // 2} - {0, plan.pools[a]}):
            yield Try("pools", _sized({**plan.pools, a: plan.pools[a] - moved, b: plan.pools[b] + moved}))
    if len(names) > 1:
        yield Try("together", {**_sized({names[0]: total}), "schedule.staleness": 0})
    elif generates(plan):
        for apart in sorted({total // 4, total // 2, 3 * total // 4} - {0}):
            split = _sized({names[0]: total - apart, "gen": apart})
            yield Try("apart", split)
            yield Try("ahead", {**split, "schedule.staleness": 1, **_corrected(plan)}, AHEAD)
            yield from streamed(plan, split)
    if len(names) > 1 and not plan.schedule.stream:
        if not plan.schedule.staleness:
            yield Try("ahead", {"schedule.staleness": 1, **_corrected(plan)}, AHEAD)
        yield from streamed(plan, {})


def streamed(plan: Plan, settings: Settings) -> Iterator[Try]:
    """Yield tries of generation that streams, with corrections for rows of older weights."""
    for staleness in (1, 2, 4):
        said = {"schedule.stream": {"staleness": staleness}, **_corrected(plan, staleness)}
        also = {"schedule.staleness": staleness} if plan.schedule.staleness else {}
        yield Try("stream", {**settings, **also, **said}, STREAM.format(k=staleness))


def _sized(pools: Mapping[str, int]) -> dict[str, Any]:
    return {"pools": {name: {"devices": count} for name, count in pools.items()}}


def _corrected(plan: Plan, staleness: int = 1) -> dict[str, Any]:
    """Return edits that make up for rows of older weights: the ratio is to those that sampled.

    Where they are older, clipping around them would hold learning up.
    """
    updates = {step.node: plan.functions["train"][step.node] for step in plan.steps if step.trains}
    edits: dict[str, Any] = {}
    for node, update in updates.items():
        if staleness > 1 and any(hook.target.endswith(":ppo_clip") for hook in update.hooks.values()):
            edits |= {f"nodes.{node}.loss.kind": "decoupled_ppo", f"nodes.{node}.loss.cap": 2.0}
            if update.ins.get("old_logprobs", "").startswith("rollout_logprobs"):
                edits[f"nodes.{node}.in.old_logprobs"] = "old_logprobs"
        elif "old_logprobs" in update.ins:
            edits[f"nodes.{node}.in.old_logprobs"] = "rollout_logprobs"
    return edits


def _serving(name: str, model: ModelPlan, gpus: bool) -> Iterator[Try]:
    assert model.serve
    at = f"models.{name}.serve"
    if has_groups(model):
        for size in GROUPS:
            yield Try("groups", {f"{at}.tensor_parallel": size})
    elif gpus and model.serve.engine == EMBEDDED:
        yield Try(SERVERS, {f"{at}.engine": SERVERS})
    for factor in FACTORS:
        rows = round(model.serve.max_rows * factor)
        yield Try("rows", {f"{at}.max_rows": rows})
        yield Try("cache", {f"{at}.cache_tokens": round(int(model.serve.cache_tokens) * factor)})
    if gpus and model.serve.dtype == "float32":
        yield Try("serve dtype", {f"{at}.dtype": "bfloat16"}, NARROW)


def _passing(name: str, model: ModelPlan, gpus: bool) -> Iterator[Try]:
    assert model.train
    at = f"models.{name}.train"
    for factor in FACTORS:
        yield Try(f"micro {name}", {f"{at}.micro_tokens": round(model.train.micro_tokens * factor)})
    if model.optimizer:
        yield Try(f"recompute {name}", {f"{at}.recompute": not model.train.recompute})
    if gpus and model.train.dtype == "float32":
        yield Try(f"dtype {name}", {f"{at}.dtype": "bfloat16"}, NARROW)
