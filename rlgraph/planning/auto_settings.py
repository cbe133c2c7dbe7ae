"""Settle what a graph leaves open as ``auto``, so that what runs is what the plan says.

By what a device is, when the graph is bound:

    dtype               bfloat16 on CUDA, float32 on CPUs
    serve.engine        sglang on CUDA, and where it spans devices or has addresses or options; else
                        transformers, as on the GPUs of a machine without SGLang

By what the cluster holds, in this order:

    serve.sync          delta, if a sync to another pool is then predicted to be shorter
    train.recompute     off, unless the plan fits only with it
    serve.cache_tokens  what is free while the engine generates. Where samples would have to wait, everything
                      else may leave the device meanwhile, if an iteration is then predicted to be shorter

Where the plan then still does not fit, by a search (rlgraph/search/fit.py) among those that
rlgraph/ir/chosen.py names, which are 1, the usual size or off wherever a plan fits with that. The engine of a
model that trains an adapter is among them: the embedded one may share the weights below the adapter.

Without a cluster memory is not planned, and fixed values take the place of these.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlgraph.costs.lora_size import served_alone
from rlgraph.costs.plan_size import sent_share
from rlgraph.engines.registry import EMBEDDED, REFUSED, SERVERS, SERVING
from rlgraph.ir.plan import ModelPlan, Plan, Step
from rlgraph.syntax.source import Tree
from rlgraph.units import seconds_text

if TYPE_CHECKING:
    from rlgraph.costs.memory import Footprint
    from rlgraph.costs.pricing import Pricing

    Laid = tuple[Pricing, Plan]  # the first has the moves of engines that it needs, the plan has none

PAGE = 1024  # a cache that is sized by what is free has a multiple of so many tokens


def embedded(tree: Tree) -> Tree:
    """Return a graph for GPUs without SGLang: its engines are embedded, but for what only SGLang can do."""
    models = tree.get("models")
    if not models:
        return tree
    for name, model in models.items.items():
        serve = model.get("serve") or Tree({}, model.mark)
        if not model.is_map or not serve.is_map:
            continue  # an error, which is found later
        engine = serve.get("engine")
        is_open = engine is None or engine.value == "auto"
        if is_open and not _needs_servers(serve):
            chosen = serve.with_item("engine", Tree(EMBEDDED, serve.mark))
            models = models.with_item(name, model.with_item("serve", chosen))
    return tree.with_item("models", models)


def _needs_servers(serve: Tree) -> bool:
    """Return whether a serve section has settings that only SGLang can follow."""
    servers = serve.get(SERVERS) or Tree({}, serve.mark)
    claims = SERVING[SERVERS].claims
    given = [key for key, value in serve.items.items() if value.value != "auto"]
    return any(key in REFUSED for key in given) or any(key in claims for key in servers.items)


def as_planned(tree: Tree, plan: Plan) -> Tree:
    """Return a composed graph with the engines that an earlier plan of it had."""
    engines = {model.serve.engine for model in plan.models.values() if model.serve}
    if plan.device != "cuda" or SERVERS in engines:
        return tree
    return embedded(tree)


def fixed(plan: Plan) -> Plan:
    """Return the plan with fixed values for what is ``auto``: its memory is not planned."""
    plan = with_settings(plan, "serve", {name: {"sync": "full"} for name in _open_syncs(plan)})
    tokens = {name: SERVING[engine].cached for name, engine in _open_caches(plan)}
    return _recomputing(_cached(plan, tokens), False)


def synced(pricing: Pricing) -> Plan:
    """Return the plan with every ``serve.sync: auto`` settled by its prices, and what they are."""
    plan = pricing.plan
    syncs = {step.model: step for step in plan.steps if step.source}
    notes = []
    for name in _open_syncs(pricing.plan):
        full, delta = 0.0, math.inf
        if name in syncs and _may_send_delta(plan.models[name]):
            full = _sync_seconds(pricing, syncs[name], "full")
            delta = _sync_seconds(pricing, syncs[name], "delta")
        if full <= delta:
            plan = with_settings(plan, "serve", {name: {"sync": "full"}})
            continue
        plan = with_settings(plan, "serve", {name: {"sync": "delta"}})
        share = sent_share(plan.models[name])
        notes.append(
            f"a sync of `{name}` sends what has changed, about {share:.0%} of its bytes: "
            f"{seconds_text(delta)} are predicted in place of {seconds_text(full)} (serve.sync)"
        )
    return replace(plan, notes=(*plan.notes, *notes))


def _sync_seconds(pricing: Pricing, step: Step, sync: str) -> float:
    """Return the seconds of a sync to another pool that sends everything, or what has changed."""
    plan = with_settings(pricing.plan, "serve", {step.model: {"sync": sync}})
    return replace(pricing, plan=plan).middle(step)


def _may_send_delta(model: ModelPlan) -> bool:
    serve = model.serve
    if serve is None or serve.addresses:
        return False
    return not served_alone(model)


def _open_syncs(plan: Plan) -> list[str]:
    return [name for name, model in plan.models.items() if model.serve and model.serve.sync == "auto"]


def settle(
    plan: Plan,
    longest: float,
    lay: Callable[[Plan], Laid],
    fits: Callable[[Footprint], bool],
    seconds: Callable[[Pricing], float],
) -> Laid:
    """Lay a plan out on its cluster with everything settled.

    Where nothing fits, it comes with the smallest caches, and computes activations again.

    Args:
        plan: as it is compiled.
        longest: tokens of the longest sample, which every cache holds.
        lay: puts a plan in order on the cluster, with the fewest moves of engines.
        fits: says whether the devices and the hosts hold it.
        seconds: predicts those of an iteration.
    """
    tokens: dict[str, int] = {}
    for name, _ in _open_caches(plan):
        serve = plan.models[name].serve
        assert serve
        tokens[name] = math.ceil(longest) * serve.attention_replicas  # each copy of attention holds a sample
    names = [*tokens]
    smallest = _cached(plan, tokens)
    laid = lay(_recomputing(smallest, False))
    laid_fits = fits(laid[0])
    if not laid_fits and any(_may_recompute(model) for model in plan.models.values()):
        laid = lay(_recomputing(smallest, True))
        laid_fits = fits(laid[0])
    if not names or not laid_fits:
        return laid
    for share in dict.fromkeys((1, len(names))):  # all engines of a region are awake at once
        roomy = lay(_filled(laid, names, share, alone=False))
        candidates = [roomy]
        if any(_waits(roomy[0], name) for name in names):
            candidates.append(lay(_filled(laid, names, share, alone=True)))
        fitting = [candidate for candidate in candidates if fits(candidate[0])]
        if len(fitting) == 1:
            return fitting[0]  # unpriced, as there is nothing to compare
        if fitting:
            return min(fitting, key=lambda candidate: seconds(candidate[0]))
    return laid


def in_flight(footprint: Footprint, step: Step) -> tuple[int, int]:
    """Return how many samples an engine has in flight at a time in a rollout, and in how many waves."""
    at_once = footprint.slots(step)
    return at_once, math.ceil(footprint.server_rows(step) / at_once)


def _waits(footprint: Footprint, model: str) -> bool:
    """Return whether samples of a model wait until others have ended, and a larger cache would help."""
    max_rows = footprint.serve(model).max_rows
    for step in _rollouts(footprint.plan, model):
        if step.phase != "train":
            continue
        at_once, waves = in_flight(footprint, step)
        if waves > 1 and at_once < max_rows:
            return True
    return False


def _filled(laid: Laid, models: Sequence[str], share: int, alone: bool) -> Plan:
    """Return the plan before its moves, with caches that take what is free, each the same share of it."""
    footprint, unmoved = laid
    tokens = {name: _room(footprint, name, share, alone) for name in models}
    return _cached(unmoved, tokens)


def _room(footprint: Footprint, model: str, share: int, alone: bool) -> int:
    """Return the most tokens that fit while a model generates; no more than its samples may ever have.

    ``footprint`` is with the smallest caches, which fit. ``alone``: all else is off the device meanwhile, not
    only what the plan moves.
    """
    smallest, useful = int(footprint.serve(model).cache_tokens), _useful(footprint, model)

    def bytes_with(tokens: int) -> int:
        plan = _cached(footprint.plan, {model: tokens})
        return _while_generating(replace(footprint, plan=plan), model, alone)

    larger = range(smallest + 1, useful + 1)
    most = smallest + bisect_right(larger, footprint.cluster.usable, key=bytes_with)
    return max(most // share // PAGE * PAGE, smallest)


def _useful(footprint: Footprint, model: str) -> int:
    """Return the tokens of all samples that a model may have in flight, each as long as one can be."""
    rollouts = _rollouts(footprint.plan, model)
    in_training = [step for step in rollouts if step.phase == "train"]
    if in_training:
        rollouts = in_training  # nobody says how many rows an evaluation has
    rows = max((footprint.server_rows(step) for step in rollouts), default=1)
    at_once = min(rows, footprint.serve(model).max_rows)
    return math.ceil(at_once * footprint.work.most)


def _while_generating(footprint: Footprint, model: str, alone: bool) -> int:
    """Return the most bytes of a device in the steps that need a model's serve engine and its cache."""
    from rlgraph.costs.memory import EngineComponent

    plan = footprint.plan
    pool = footprint.serve(model).pool
    cache = EngineComponent(model, "serve", "kv")
    rollouts = _rollouts(plan, model)

    def needs_cache(step: Step) -> bool:
        return step in rollouts or cache in footprint.needs(pool, step)

    most = 0
    for steps in (footprint.in_order(), plan.eval_steps):
        for step, usage in footprint.moments(pool, steps, needs_cache):
            if alone:
                unneeded = {*footprint.items(pool)} - footprint.needs(pool, step)
                usage = footprint.resident(pool, unneeded) + footprint.transient(pool, step)
            most = max(most, usage.total())
    return most


def _rollouts(plan: Plan, model: str) -> list[Step]:
    steps = (*plan.steps, *plan.eval_steps)
    return [step for step in steps if step.generates and model in step.models]


def _open_caches(plan: Plan) -> list[tuple[str, str]]:
    """Return the models whose cache is not settled yet, with their engine."""
    engines = []
    for name, model in plan.models.items():
        if model.serve and model.serve.cache_tokens == "auto":
            engines.append((name, model.serve.engine))
    return engines


def with_settings(plan: Plan, engine: str, settings: Mapping[str, Mapping[str, Any]]) -> Plan:
    """Return the plan with other settings of the train or serve engines of some models."""
    models = dict(plan.models)
    for name, values in settings.items():
        settings_of_engine = getattr(models[name], engine)
        models[name] = replace(models[name], **{engine: settings_of_engine.model_copy(update=values)})
    return replace(plan, models=models)


def _cached(plan: Plan, tokens: Mapping[str, int]) -> Plan:
    """Return the plan with caches of so many tokens."""
    settings = {name: {"cache_tokens": count} for name, count in tokens.items()}
    return with_settings(plan, "serve", settings)


def _may_recompute(model: ModelPlan) -> bool:
    return bool(model.train and model.optimizer and model.train.recompute == "auto")


def _recomputing(plan: Plan, again: bool) -> Plan:
    """Return the plan with every ``recompute: auto`` settled; what is frozen has nothing to compute again."""
    settled = {}
    for name, model in plan.models.items():
        if model.train and model.train.recompute == "auto":
            settled[name] = {"recompute": again and _may_recompute(model)}
    return with_settings(plan, "train", settled)
