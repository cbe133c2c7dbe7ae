"""Saved plans with keys that graphs had once (see rlgraph/syntax/former_keys.py), read as if written today.

So a saved plan can be run, and its run can go on. A graph's own file is not translated: whoever has it
changes it, as the error about it says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlgraph.frontend.compose import setting
from rlgraph.frontend.tree_paths import SECTIONS
from rlgraph.lowering import digest
from rlgraph.nodes import OPS
from rlgraph.syntax.former_keys import (
    OF_REFILL,
    OF_SCHEDULE,
    OF_SERVE,
    engine_of_setting,
    present,
    present_graph,
    present_path,
)
from rlgraph.syntax.settings import Buffer
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import flow

SERVE_SETTING = re.compile(r"models\.(\w+)\.serve\.(\w+)")  # in a note


def present_plan(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved plan, with present keys in its schedule, its functions and its graph.

    Fields that are not as a plan has them stay, for the error that names them.
    """
    plan = dict(fields)
    schedule = plan.get("schedule")
    if isinstance(schedule, dict) and OF_SCHEDULE.keys() <= schedule.keys():
        plan["schedule"] = _with_buffer(schedule, plan.get("regions"))
        for phase in ("steps", "eval_steps"):
            steps = plan.get(phase)
            if isinstance(steps, list):
                plan[phase] = [_with_present_reason(step) for step in steps]
    functions = plan.get("functions")
    if isinstance(functions, dict):
        plan["functions"] = {phase: _with_staleness(by_node) for phase, by_node in functions.items()}
    origin = plan.get("origin")
    if isinstance(origin, dict) and isinstance(origin.get("composed"), dict):
        _make_origin_present(plan, origin)
    return plan


def _make_origin_present(plan: dict[str, Any], origin: Mapping[str, Any]) -> None:
    """Change the graph, the overrides and the notes of a plan to present keys, and its digest by them."""
    composed = origin["composed"]
    graph = present_graph(composed)
    if graph != composed:
        overrides = _present_overrides(origin["overrides"], composed, graph)
        plan["origin"] = {**origin, "composed": graph, "overrides": overrides}
        plan["digest"] = digest(Tree.of(graph), str(plan.get("device")))
    notes = plan.get("notes")
    if isinstance(notes, list):
        engines = _engines(composed)
        plan["notes"] = [_present_note(str(note), engines) for note in notes]


def present_override(override: str, engines: Mapping[str, Any]) -> str:
    """Return ``key=value`` with each engine's settings in its section.

    Args:
        override: as it was typed.
        engines: the engines that the graph names, by model.

    Example:
        >>> present_override("models.policy.serve.restarts=0", {})
        'models.policy.serve.sglang.restarts=0'
        >>> present_override("models.judge.serve={engine: openai, request_retries: 2}", {})
        'models.judge.serve={engine: openai, openai: {request_retries: 2}}'
    """
    path = override.partition("=")[0].strip().split(".")
    if path[0] != "models" or len(path) < 2:
        return override
    name, value = setting(override)
    match path:
        case [_, model, "serve", key, *rest] if key in OF_SERVE:
            section = engine_of_setting(engines.get(model), key)
            typed = override.partition("=")[2]
            return f"{'.'.join(['models', model, 'serve', section, key, *rest])}={typed}"
        case [_, model] | [_, model, "serve"]:
            changed = _with_engine_sections(path, value.plain(), engines.get(model))
            return override if changed == value.plain() else f"{name}={flow(changed)}"
        case _:
            return override


def _with_engine_sections(path: Sequence[str], value: Any, engine: Any) -> Any:
    """Return the value of an override at a model, or at its ``serve``, with engines' settings in sections."""
    is_model = len(path) == 2
    model = value if is_model else {"serve": value}
    serve = model.get("serve") if isinstance(model, Mapping) else None
    if not isinstance(serve, Mapping):
        return value
    # the graph names the engine where the override does not
    lacks_engine = bool(engine) and "engine" not in serve
    if lacks_engine:
        model = {**model, "serve": {"engine": engine, **serve}}
    present_model = present_graph({"models": {path[1]: model}})["models"][path[1]]
    if lacks_engine:
        del present_model["serve"]["engine"]
    return present_model if is_model else present_model["serve"]


def _engines(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine that each model of a composed graph names."""
    models = graph.get("models")
    if not isinstance(models, Mapping):
        return {}
    engines = {}
    for name, model in models.items():
        serve = model.get("serve") if isinstance(model, Mapping) else None
        if isinstance(serve, Mapping) and "engine" in serve:
            engines[name] = serve["engine"]
    return engines


def _present_note(note: str, engines: Mapping[str, Any]) -> str:
    """Return a note of a plan with settings of engines where graphs have them."""

    def translate(match: re.Match[str]) -> str:
        model, key = match.groups()
        if key not in OF_SERVE:
            return match[0]
        return f"models.{model}.serve.{engine_of_setting(engines.get(model), key)}.{key}"

    return SERVE_SETTING.sub(translate, note)


def _present_overrides(
    overrides: Sequence[str], composed: Mapping[str, Any], graph: Mapping[str, Any]
) -> list[str]:
    """Return overrides without former keys; a last one sets the buffer that the graph has by them.

    Args:
        overrides: as they were typed.
        composed: the graph as it was saved.
        graph: that graph without former keys.
    """
    engines = _engines(composed)
    settings = []
    had_buffer_keys = False
    for override in overrides:
        present_text = present_override(override, engines)
        name, value = setting(present_text)
        remaining = _without_former_keys(name, value)
        if remaining is value:
            settings.append(present_text)
            continue
        had_buffer_keys = True
        if remaining is not None:
            settings.append(f"{name}={flow(remaining)}")
    if had_buffer_keys:
        settings.append(f"schedule.buffer={flow(graph['schedule'].get('buffer'))}")
    return settings


def _without_former_keys(name: str, value: Tree) -> Tree | None:
    """Return the value of an override without former keys; None: it sets nothing but one."""
    path = tuple(name.split("."))
    if path[0] not in SECTIONS:
        path = ("nodes", *path)
    is_of_refill = len(path) == 4 and path[2] == "refill" and path[3] in OF_REFILL
    if present_path(name) or is_of_refill:
        return None
    tree = value
    for key in reversed(path):
        tree = Tree({key: tree}, value.mark)
    present_tree, problems = present(tree)
    return present_tree.find(path) if problems else value


def _with_buffer(schedule: Mapping[str, Any], regions: Any) -> dict[str, Any]:
    """Return a schedule as a plan has it, with its buffer in place of former keys."""
    present_schedule = {key: value for key, value in schedule.items() if key not in OF_SCHEDULE}
    defaults = Buffer().model_dump()
    buffer = None
    for region in _records(regions):
        if region.get("keep"):
            order = region.get("policy") or defaults["order"]
            buffer = {**defaults, "staleness": region["keep"], "by": "surplus", "order": order}
    if schedule["staleness"]:
        buffer = {**defaults, "staleness": schedule["staleness"], "by": "batch"}
    if isinstance(schedule["stream"], dict):
        buffer = {**schedule["stream"], "by": "group"}
    return {**present_schedule, "buffer": buffer}


def _with_present_reason(step: Any) -> Any:
    """Return a step whose reason names a present key."""
    if not isinstance(step, dict) or "because" not in step:
        return step
    reason = str(step["because"])
    return {**step, "because": reason.replace("`schedule.stream", "`schedule.buffer")}


def _with_staleness(by_node: Any) -> Any:
    """Return the functions of a plan's nodes; a replay bounds the age of its rows by ``staleness``."""
    if not isinstance(by_node, dict):
        return by_node
    return {node: _with_replay_staleness(function) for node, function in by_node.items()}


def _with_replay_staleness(function: Any) -> Any:
    if not isinstance(function, dict) or function.get("target") != OPS["replay"]:
        return function
    attributes = function.get("attributes")
    if not isinstance(attributes, dict) or "max_age" not in attributes:
        return function
    present_attributes = dict(attributes)
    present_attributes["staleness"] = present_attributes.pop("max_age")
    roles = {**function["roles"], "oldest": "staleness"}
    return {**function, "attributes": present_attributes, "roles": roles}


def _records(fields: Any) -> list[dict[str, Any]]:
    """Return the records of a mapping, as far as it is one and has such."""
    if not isinstance(fields, dict):
        return []
    return [record for record in fields.values() if isinstance(record, dict)]
