"""Saved plans of an older rlgraph, in the words that graphs have today.

Settings of one serve engine stood beside those that all have:

    serve: {engine: sglang, restarts: 0}  ->  serve: {engine: sglang, sglang: {restarts: 0}}

What a plan says of the graph that it was made from is translated where it is read, so that it can be run, and
its run can go on. A graph's own file is not: whoever has it changes it, as the error about it says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlgraph.frontend.compose import setting
from rlgraph.frontend.moved_settings import MOVED, section_of
from rlgraph.ir.plan import Plan
from rlgraph.syntax.yaml_text import flow

SETTING = re.compile(r"models\.(\w+)\.serve\.(\w+)")  # in a note


def translated(plan: Plan) -> Plan:
    """Return a saved plan whose origin and notes have settings where graphs have them today."""
    if plan.origin is None:
        return plan
    engines = _engines(plan.origin.composed)
    origin = replace(
        plan.origin,
        composed=translated_graph(plan.origin.composed),
        overrides=tuple(translated_override(override, engines) for override in plan.origin.overrides),
    )
    notes = tuple(_translated_note(note, engines) for note in plan.notes)
    if origin == plan.origin and notes == plan.notes:
        return plan
    return replace(plan, origin=origin, notes=notes)


def translated_graph(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed graph with each engine's settings in its section."""
    models = graph.get("models")
    if not isinstance(models, Mapping):
        return dict(graph)
    engines = _engines(graph)
    return {**graph, "models": {name: _model(model, engines.get(name)) for name, model in models.items()}}


def translated_override(override: str, engines: Mapping[str, Any]) -> str:
    """Return ``key=value`` with each engine's settings in its section.

    Args:
        override: as it was typed.
        engines: the engines that the graph names, by model.

    Example:
        >>> translated_override("models.policy.serve.restarts=0", {})
        'models.policy.serve.sglang.restarts=0'
        >>> translated_override("models.judge.serve={engine: openai, request_retries: 2}", {})
        'models.judge.serve={engine: openai, openai: {request_retries: 2}}'
    """
    path = override.partition("=")[0].strip().split(".")
    if path[0] != "models" or len(path) < 2:
        return override
    name, value = setting(override)
    engine = engines.get(path[1])
    match path[2:]:
        case ["serve", key, *rest] if key in MOVED:
            typed = override.partition("=")[2]
            return f"{'.'.join([*path[:3], section_of(engine, key), key, *rest])}={typed}"
        case []:
            changed = _model(value.plain(), engine)
        case ["serve"]:
            changed = _serve(value.plain(), engine)
        case _:
            return override
    return override if changed == value.plain() else f"{name}={flow(changed)}"


def _engines(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine that each model of a composed graph names."""
    engines = {}
    models = graph.get("models")
    for name, model in (models if isinstance(models, Mapping) else {}).items():
        serve = model.get("serve") if isinstance(model, Mapping) else None
        if isinstance(serve, Mapping) and "engine" in serve:
            engines[name] = serve["engine"]
    return engines


def _model(model: Any, engine: Any) -> Any:
    if not isinstance(model, Mapping) or "serve" not in model:
        return model
    return {**model, "serve": _serve(model["serve"], engine)}


def _serve(serve: Any, engine: Any) -> Any:
    if not isinstance(serve, Mapping) or not MOVED & serve.keys():
        return serve
    moved = {key: value for key, value in serve.items() if key not in MOVED}
    for key, value in serve.items():
        if key in MOVED:
            section = section_of(serve.get("engine", engine), key)
            moved[section] = {**moved.get(section, {}), key: value}
    return moved


def _translated_note(note: str, engines: Mapping[str, Any]) -> str:
    def translate(match: re.Match[str]) -> str:
        model, key = match.groups()
        if key not in MOVED:
            return match[0]
        return f"models.{model}.serve.{section_of(engines.get(model), key)}.{key}"

    return SETTING.sub(translate, note)
