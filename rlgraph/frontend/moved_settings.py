"""Settings of one engine that stand in ``serve`` itself, where they were before engines had sections.

A graph that has one is refused, with the edit that mends it. ``rlgraph/reports/older_plans.py`` translates
those of saved plans and runs.
"""

from __future__ import annotations

from typing import Any

from rlgraph.engines.registry import SERVERS, SERVING, has_own_setting
from rlgraph.syntax.model_settings import ServeSettings, SharedServe
from rlgraph.syntax.source import Tree
from rlgraph.syntax.validate import Binder
from rlgraph.syntax.yaml_text import flow

MOVED = ServeSettings.model_fields.keys() - SharedServe.model_fields.keys()


def without_moved_settings(model: Tree, path: str, binder: Binder) -> Tree:
    """Return a model's section without an engine's settings that stand in ``serve`` itself; they are noted.

    Args:
        model: the section.
        path: the graph's name for it, as ``models.policy``.
        binder: where problems are noted.
    """
    serve = model.get("serve")
    if serve is None or not MOVED & serve.items.keys():
        return model
    engine = serve.get("engine")
    for key, setting in serve.items.items():
        if key in MOVED:
            section = section_of(engine.value if engine else None, key)
            law = f"`{path}.serve.{key}` is a setting of {section} alone, and stands in its section"
            edit = flow({f"{path}.serve.{section}.{key}": setting.written()})
            remedy = f"leave it out, and set: {edit}"
            binder.problem("moved-setting", law, setting.key, (), remedy)
            serve = serve.with_item(key, None)
    return model.with_item("serve", serve)


def section_of(engine: Any, key: str) -> str:
    """Return the engine whose section has a setting: the one that is named, or else the run's servers."""
    if engine in SERVING and has_own_setting(engine, key):
        return str(engine)
    return SERVERS
