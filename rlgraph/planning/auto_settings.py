"""Settle what a graph leaves open as ``auto``, so that what runs is what the plan says.

By what a device is, when the graph is bound:

    dtype               bfloat16 on CUDA, float32 on CPUs
    serve.engine        sglang on CUDA, and where it spans devices or has addresses or options; else
                        transformers, as on the GPUs of a machine without SGLang

By what the cluster holds, in this order:

    train.recompute     off, unless the plan fits only with it
    serve.cache_tokens  what is free while the engine generates. Where samples would have to wait, everything
                      else may leave the device meanwhile, if an iteration is then predicted to be shorter

Without a cluster memory is not planned, and fixed values take the place of the latter two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlgraph.costs.memory import Footprint, Item
from rlgraph.costs.pricing import Pricing
from rlgraph.engines.registry import EMBEDDED, REFUSED, SERVERS, SERVING
from rlgraph.ir.plan import ModelPlan, Plan, Step
from rlgraph.syntax.source import Tree

PAGE = 1024  # a cache that is sized by what is free has a multiple of so many tokens
Laid = tuple[Pricing, Plan]  # with the moves of engines that it needs, and the plan without them


def embedded(tree: Tree) -> Tree:
    """A composed graph for GPUs without SGLang: what only SGLang can do aside, its engines are embedded."""
    models = tree.get("models")
    for name, model in (models.items if models else {}).items():
        serve = model.get("serve") or Tree({}, model.mark)
        engine = serve.get("engine")
        opens = serve.is_map and not serve.items.keys() & {*REFUSED}
        if models and model.is_map and opens and (engine is None or engine.value == "auto"):
            chosen = serve.with_item("engine", Tree(EMBEDDED, serve.mark))
            models = models.with_item(name, model.with_item("serve", chosen))
    return tree.with_item("models", models) if models else tree


def as_planned(tree: Tree, plan: Plan) -> Tree:
    """A composed graph with the engines that an earlier plan of it had."""
    engines = {model.serve.engine for model in plan.models.values() if model.serve}
    return embedded(tree) if plan.device == "cuda" and SERVERS not in engines else tree


def fixed(plan: Plan) -> Plan:
    """The plan with fixed values for what is ``auto``: its memory is not planned."""
    return _recomputing(_cached(plan, {name: SERVING[engine].cached for name, engine in _autos(plan)}), False)


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
        fits: whether the devices and the hosts hold it.
        seconds: what is predicted for an iteration.
    """
    names = [name for name, _ in _autos(plan)]
    smallest = _cached(plan, dict.fromkeys(names, math.ceil(longest)))
    laid = lay(_recomputing(smallest, False))
    if not fits(laid[0]) and any(_may_recompute(model) for model in plan.models.values()):
        laid = lay(_recomputing(smallest, True))
    if not names or not fits(laid[0]):
        return laid
    for share in dict.fromkeys((1, len(names))):  # of a region all engines are awake at once
        found = [lay(_filled(laid, names, share, alone=False))]
        if any(_waits(found[0][0], name) for name in names):
            found.append(lay(_filled(laid, names, share, alone=True)))
        if fitting := [one for one in found if fits(one[0])]:
            return min(fitting, key=lambda one: seconds(one[0]))
    return laid


def in_flight(footprint: Footprint, step: Step) -> tuple[int, int]:
    """Samples that an engine has in flight at a time in a rollout, and in how many waves all of them come."""
    serve, at_once = footprint.serve(next(iter(step.models))), footprint.slots(step)
    rows = footprint.device_rows(step) * serve.tensor_parallel
    return at_once, math.ceil(rows / at_once)


def _waits(footprint: Footprint, model: str) -> bool:
    """Return whether samples of a model wait until others have ended, and a larger cache would help."""
    serve = footprint.serve(model)
    rollouts = [step for step in _rollouts(footprint.plan, model) if step.phase == "train"]
    return any(
        at_once < serve.max_rows and waves > 1
        for at_once, waves in (in_flight(footprint, step) for step in rollouts)
    )


def _filled(laid: Laid, models: Sequence[str], share: int, alone: bool) -> Plan:
    """The plan before its moves, with caches that take what is free, each the same share of it."""
    footprint, before = laid
    return _cached(before, {name: _room(footprint, name, share, alone) for name in models})


def _room(footprint: Footprint, model: str, share: int, alone: bool) -> int:
    """The most tokens that fit while a model generates; no more than its samples may ever have.

    Args:
        footprint: with the smallest caches, which fit.
        model: whose serve engine it is.
        alone: whether all else is off the device meanwhile; else what the plan moves.
    """
    serve = footprint.serve(model)
    low, high = int(serve.cache_tokens), _useful(footprint, model)
    capacity = int(footprint.cluster.memory)
    while low < high:
        middle = (low + high + 1) // 2
        plan = _cached(footprint.plan, {model: middle})
        if _while_generating(replace(footprint, plan=plan), model, alone) <= capacity:
            low = middle
        else:
            high = middle - 1
    return max(low // share // PAGE * PAGE, int(serve.cache_tokens))


def _useful(footprint: Footprint, model: str) -> int:
    """Tokens of all samples that a model may have in flight, if each were as long as one can be."""
    serve, rollouts = footprint.serve(model), _rollouts(footprint.plan, model)
    # of an evaluation nobody says how many rows it has
    trains = [step for step in rollouts if step.phase == "train"]
    rows = (footprint.device_rows(step) * serve.tensor_parallel for step in trains or rollouts)
    return math.ceil(min(max(rows, default=1), serve.max_rows) * footprint.work.most)


def _while_generating(footprint: Footprint, model: str, alone: bool) -> int:
    """The most bytes that a device holds in the steps that need a model's serve engine and its cache."""
    plan, pool, wanted = footprint.plan, footprint.serve(model).pool, Item(model, "serve", "kv")
    found = [0]
    for steps in (footprint.in_order(), plan.eval_steps):
        for step, parts in footprint.moments(pool, steps):
            needs = footprint.needs(pool, step)
            generates = step in _rollouts(plan, model) or wanted in needs
            if generates and alone:
                away = {*footprint.items(pool)} - needs
                parts = footprint.resident(pool, away) + footprint.transient(pool, step)
            found += [parts.total()] if generates else []
    return max(found)


def _rollouts(plan: Plan, model: str) -> list[Step]:
    steps = (*plan.steps, *plan.eval_steps)
    return [s for s in steps if s.generates and model in s.models]


def _autos(plan: Plan) -> Iterator[tuple[str, str]]:
    """Models whose cache is not settled yet, with their engine."""
    for name, model in plan.models.items():
        if model.serve and model.serve.cache_tokens == "auto":
            yield name, model.serve.engine


def with_settings(plan: Plan, engine: str, settings: Mapping[str, Mapping[str, Any]]) -> Plan:
    """The plan with other settings of the train or serve engines of some models."""
    models = dict(plan.models)
    for name, values in settings.items():
        held = getattr(models[name], engine)
        models[name] = replace(models[name], **{engine: held.model_copy(update=values)})
    return replace(plan, models=models)


def _cached(plan: Plan, tokens: Mapping[str, int]) -> Plan:
    """The plan with caches of so many tokens."""
    return with_settings(plan, "serve", {name: {"cache_tokens": count} for name, count in tokens.items()})


def _may_recompute(model: ModelPlan) -> bool:
    return bool(model.train and model.optimizer and model.train.recompute == "auto")


def _recomputing(plan: Plan, again: bool) -> Plan:
    """The plan with every ``recompute: auto`` settled; what is frozen has nothing to compute again."""
    open_models = {name: m for name, m in plan.models.items() if m.train and m.train.recompute == "auto"}
    settled = {name: {"recompute": again and _may_recompute(m)} for name, m in open_models.items()}
    return with_settings(plan, "train", settled)
