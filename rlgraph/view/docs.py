"""What the ops and losses of a plan say of themselves."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlgraph.catalog import load
from rlgraph.describe import Entry, entry_of
from rlgraph.docstring import read_docstring
from rlgraph.nodes import HOOKS, OPS
from rlgraph.plan import Function
from rlgraph.view.given import Given

HOOK_OF: dict[str, str] = {target: name for known in HOOKS.values() for name, target in known.items()}


def docs(new: Given) -> dict[str, dict[str, Any]]:
    """Op or loss -> its docs; of a user's only where its file was loaded to compile the graph."""
    found: dict[str, dict[str, Any]] = {}
    for phase, functions in new.plan.functions.items():
        steps = new.plan.steps if phase == "train" else new.plan.eval_steps
        names = {step.node: step.op for step in steps}
        for node, function in functions.items():
            _note(found, names[node], function, names[node] in OPS, new.compiled)
            for path, hook in function.hooks.items():
                kind = load(function.target).hook(path) if new.compiled else None
                _note(found, hook_name(hook), hook, hook.target in HOOK_OF, new.compiled, kind)
    return found


def hook_name(hook: Function) -> str:
    """As graphs call it: a shipped loss or tool by its name, another by its file and function."""
    return HOOK_OF.get(hook.target, hook.target)


def _note(
    found: dict[str, dict[str, Any]],
    name: str,
    function: Function,
    shipped: bool,
    compiled: bool,
    kind: Any = None,
) -> None:
    if name in found:
        return
    if shipped:
        found[name] = _entry(entry_of(name))
    elif compiled:
        doc = read_docstring(load(function.target, name, kind).doc)
        found[name] = {**asdict(doc), "facts": [("source", ", ".join(doc.sources))]}


def _entry(entry: Entry) -> dict[str, Any]:
    return {**asdict(entry.doc), "facts": [*entry.facts]}
