"""Models on the same frozen weights hold them once: who holds those of whom.

Frozen are all weights of a frozen model, and of one with ``train.lora`` all but its adapters and a new value
head. On the same weights of a pool, in the same layout:

    policy  lora                the weights of the language model, and an adapter
    critic  lora, head value    an adapter and a head, on the weights of policy
    ref     frozen              nothing, on the weights of policy
    judge   frozen, float32     all of its own: its data type is another, as a note says

Each keeps its gradients, its optimizer, its checkpoints and its syncs: no number of a run depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlgraph.costs.lora_size import quantizes
from rlgraph.ir.mesh import ON_ONE_DEVICE
from rlgraph.ir.plan import ModelPlan, Plan, TrainPlan
from rlgraph.syntax.source import OPEN

# what a frozen model has as the one that holds its weights, where the graph leaves it as it is by default
LIKE_THE_HOLDER = (*ON_ONE_DEVICE, "micro_tokens", "score_tokens", "reshard", "packing")


def share_weights(plan: Plan) -> Plan:
    """Return the plan in which frozen weights are held once, and notes say which are not and why."""
    copied_onto: set[str] = set()  # models whose weights a step replaces
    for steps in plan.phases.values():
        copied_onto |= {step.updated for step in steps if step.copied}
    names = [name for name, model in plan.models.items() if _is_on_frozen_weights(model)]
    # a language model has all weights of one with a value head
    names.sort(key=lambda name: (plan.models[name].head != "lm", plan.models[name].frozen))
    holders: list[str] = []
    for name in names:
        obstacles = ""  # to sharing with the first of the holders that have the same weights
        for holder in holders:
            if _weights(plan.models[holder]) != _weights(plan.models[name]):
                continue
            shared = _on_weights_of(holder, name, plan)
            reasons = [f"weights are copied onto {model}" for model in (name, holder) if model in copied_onto]
            reasons += _differences(shared, name, holder)
            if not reasons:
                plan = shared
                break
            if not obstacles:
                obstacles = f"{holder} and {name} each hold the same frozen weights: {' and '.join(reasons)}"
        else:
            holders.append(name)
            if obstacles:
                plan = replace(plan, notes=(*plan.notes, obstacles))
    return plan


def _is_on_frozen_weights(model: ModelPlan) -> bool:
    if model.train is None or model.path == OPEN:
        return False
    return model.frozen or bool(model.train.lora)


def _weights(model: ModelPlan) -> tuple[object, ...]:
    """Return a key that is equal for models whose weights are, but for those that train and a head."""
    return model.path, model.config, model.trust_remote_code


def _on_weights_of(holder: str, name: str, plan: Plan) -> Plan:
    """Return the plan in which a model is on the weights of another."""
    model = plan.models[name]
    train, holders_train = model.train, plan.models[holder].train
    assert train and holders_train
    if model.frozen:
        settings = {}
        for key in LIKE_THE_HOLDER:
            is_default = getattr(train, key) == TrainPlan.model_fields[key].default
            if is_default:
                settings[key] = getattr(holders_train, key)
        train = train.model_copy(update=settings)
    return replace(plan, models={**plan.models, name: replace(model, shares=holder, train=train)})


def _differences(plan: Plan, name: str, holder: str) -> Iterator[str]:
    """Yield why a model can't be on the weights of another."""
    train, holders_train = plan.models[name].train, plan.models[holder].train
    assert train and holders_train
    for key in ("engine", "pool", "dtype"):
        value, holders_value = getattr(train, key), getattr(holders_train, key)
        if value != holders_value:
            yield f"train.{key} is {holders_value} and {value}"
    if not plan.models[name].frozen and quantizes(plan.models[name]) != quantizes(plan.models[holder]):
        yield "one holds them in 4 bits (train.lora.quantize)"
    mesh, holders_mesh = plan.meshes[name], plan.meshes[holder]
    if train.pool == holders_train.pool and mesh != holders_mesh:
        yield f"their meshes are {holders_mesh} and {mesh}"
