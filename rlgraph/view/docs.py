"""Collects the docs of a plan's ops and losses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlgraph.ir.plan import Function
from rlgraph.nodes import HOOKS, OPS
from rlgraph.ops.docstring import read_docstring
from rlgraph.ops.registry import load
from rlgraph.reference.describe import entry_of
from rlgraph.view.given import Subject

HOOK_OF: dict[str, str] = {target: name for known in HOOKS.values() for name, target in known.items()}


def docs(new: Subject) -> dict[str, dict[str, Any]]:
    """Return op or loss -> its docs; of a user's only where its file was loaded to compile the graph."""
    found: dict[str, dict[str, Any]] = {}
    for phase, functions in new.plan.functions.items():
        names = {step.node: step.op for step in new.plan.phases[phase]}
        for node, function in functions.items():
            name = names[node]
            if name not in found and (name in OPS or new.compiled):
                found[name] = _shipped(name) if name in OPS else _own(name, function)
            for path, hook in function.hooks.items():
                shipped, name = hook.target in HOOK_OF, hook_name(hook)
                if name not in found and (shipped or new.compiled):
                    kind = None if shipped else load(function.target).hook(path)
                    found[name] = _shipped(name) if shipped else _own(name, hook, kind)
    return found


def hook_name(hook: Function) -> str:
    """Return a hook's name in graphs: a shipped loss or tool by its name, another by file and function."""
    return HOOK_OF.get(hook.target, hook.target)


def _own(name: str, function: Function, kind: Any = None) -> dict[str, Any]:
    doc = read_docstring(load(function.target, name, kind).doc)
    return {**asdict(doc), "facts": [("source", ", ".join(doc.sources))]}


def _shipped(name: str) -> dict[str, Any]:
    entry = entry_of(name)
    return {**asdict(entry.doc), "facts": [*entry.facts]}
