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

from rlgraph.ir.mesh import ON_ONE_DEVICE
from rlgraph.ir.plan import ModelPlan, Plan, TrainPlan
from rlgraph.syntax.source import OPEN

# what a frozen model has as the one that holds its weights, where the graph leaves it as it is by default
LIKE_THE_HOLDER = (*ON_ONE_DEVICE, "micro_tokens", "score_tokens", "reshard", "packing")


def share_weights(plan: Plan) -> Plan:
    """Return the plan in which frozen weights are held once, and notes say which are not and why."""
    copied_onto = {step.updated for steps in plan.phases.values() for step in steps if step.copied}
    names = [name for name, model in plan.models.items() if _is_on_frozen_weights(model)]
    # a language model has all weights of one with a value head
    names.sort(key=lambda name: (plan.models[name].head != "lm", plan.models[name].frozen))
    holders: list[str] = []
    for name in names:
        laws: dict[str, list[str]] = {}
        for holder in holders:
            if _weights(plan.models[holder]) == _weights(plan.models[name]):
                shared = _on_weights_of(holder, name, plan)
                laws[holder] = [f"weights are copied onto {n}" for n in (name, holder) if n in copied_onto]
                laws[holder] += _differences(shared, name, holder)
                if not laws[holder]:
                    plan = shared
                    break
        else:
            holders.append(name)
            if laws:
                holder, why = next(iter(laws.items()))
                note = f"{holder} and {name} each hold the same frozen weights: {' and '.join(why)}"
                plan = replace(plan, notes=(*plan.notes, note))
    return plan


def _is_on_frozen_weights(model: ModelPlan) -> bool:
    return bool(model.train and model.path != OPEN and (model.frozen or model.train.lora))


def _weights(model: ModelPlan) -> tuple[object, ...]:
    """Return what two models have alike whose weights are the same, but for those that train and a head."""
    return model.path, model.config, model.trust_remote_code


def _on_weights_of(holder: str, name: str, plan: Plan) -> Plan:
    """Return the plan in which a model is on the weights of another."""
    model, held = plan.models[name], plan.models[holder].train
    assert model.train and held
    fields = TrainPlan.model_fields
    open_keys = [k for k in LIKE_THE_HOLDER if model.frozen and getattr(model.train, k) == fields[k].default]
    train = model.train.model_copy(update={key: getattr(held, key) for key in open_keys})
    return replace(plan, models={**plan.models, name: replace(model, shares=holder, train=train)})


def _differences(plan: Plan, name: str, holder: str) -> Iterator[str]:
    """Yield why a model can't be on the weights of another."""
    model, held = plan.models[name].train, plan.models[holder].train
    assert model and held
    for key in ("engine", "pool", "dtype"):
        if getattr(model, key) != getattr(held, key):
            both = f"{getattr(held, key)} and {getattr(model, key)}"
            yield f"train.{key} is {both}"
    if model.pool == held.pool and (own := plan.meshes[name]) != (theirs := plan.meshes[holder]):
        yield f"their meshes are {theirs} and {own}"
