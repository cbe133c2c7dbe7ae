"""Settings that a search chooses where a plan does not fit and the graph gives them no value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlgraph.ir.plan import Plan
from rlgraph.syntax.model_settings import MICRO_TOKENS, ON_DEVICE, ONE_DEVICE

# setting of a model -> what it is where a plan fits with that
CHOSEN: Mapping[str, Any] = {
    "serve.tensor_parallel": ONE_DEVICE,
    "train.micro_tokens": MICRO_TOKENS,
    "train.sequence_parallel": ONE_DEVICE,
    "train.tensor_parallel": ONE_DEVICE,
    "train.expert_parallel": ONE_DEVICE,
    "train.optimizer_offload": ON_DEVICE,
    "train.activation_offload": ON_DEVICE,
}


def open_settings(plan: Plan, composed: Mapping[str, Any]) -> frozenset[str]:
    """Return the settings that a search may choose: those of ``CHOSEN`` to which the graph gives no value.

    Args:
        plan: whose models.
        composed: the graph, with all overrides, as plain values.
    """
    paths = set()
    for name in plan.models:
        model = composed.get("models", {}).get(name) or {}
        for setting in CHOSEN:
            engine, field = setting.split(".")
            value = (model.get(engine) or {}).get(field, "auto")
            if value == "auto":
                paths.add(f"models.{name}.{setting}")
    return frozenset(paths)


def chosen_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings that a search chose for a plan, which would not fit without them."""
    if plan.origin is None:
        return {}
    settings = {}
    is_open = open_settings(plan, plan.origin.composed)
    for name, model in plan.models.items():
        for setting, usual in CHOSEN.items():
            engine, field = setting.split(".")
            value = getattr(getattr(model, engine), field, usual)
            path = f"models.{name}.{setting}"
            if path in is_open and value != usual:
                settings[path] = value
    return settings
