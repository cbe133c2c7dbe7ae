"""Settings that a search chooses where a plan does not fit and the graph gives them no value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlgraph.engines.registry import SERVERS
from rlgraph.ir.plan import Plan
from rlgraph.syntax.model_settings import MICRO_TOKENS, ON_DEVICE, ONE_DEVICE

NOTE = "chosen: "  # with this begins the note of a plan on what was chosen
ENGINE = "serve.engine"
# setting of a model -> what it is where a plan fits with that
CHOSEN: Mapping[str, Any] = {
    ENGINE: SERVERS,
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
            if setting == ENGINE and not _is_noted(plan, f"{path}={value}"):
                continue  # it is the usual one of CPUs, and of GPUs on machines without SGLang
            if path in is_open and value != usual:
                settings[path] = value
    return settings


def _is_noted(plan: Plan, setting: str) -> bool:
    """Return whether a note says that a setting was chosen."""
    notes = [note for note in plan.notes if note.startswith(NOTE)]
    return any(setting in note.split() or f"{setting}," in note.split() for note in notes)
