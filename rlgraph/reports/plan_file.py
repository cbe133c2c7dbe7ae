"""A plan in a file: written by ``rlgraph plan -o plan.json``, read strictly, held to what it was made from.

A saved plan is a promise of what will run. Before it runs, its graph is composed and planned again; the two
plans must be the same.

    plan.json ─ parse ─ Plan ─ origin ─ compose ─ same graph? ─ plan ─ same plan? ─ run
                                                    │ no               │ no
                                                  the edits          the steps
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlgraph import version
from rlgraph.compiler import Compilation
from rlgraph.costs.detect import local_device
from rlgraph.costs.hardware import Here
from rlgraph.errors import GraphError, Mark, RunError, Source, fail
from rlgraph.frontend.graph_diff import diff_text
from rlgraph.ir.function import Function
from rlgraph.ir.plan import VERSION, Origin, Plan, checksum
from rlgraph.ops import registry
from rlgraph.printing.plan_diff import differences
from rlgraph.reports.former_plans import present_plan
from rlgraph.request import PlanRequest
from rlgraph.syntax.settings import GRAPH_NAME
from rlgraph.syntax.source import OPEN, Tree

SHOWN = 3  # wrong fields that an error names
SETTLED = (
    "is a saved plan: its overrides, devices and cluster are settled; "
    "to change them, plan its graph with others"
)


def is_plan(graph: str) -> bool:
    """Return whether what was given for a graph is a saved plan: a file of JSON that holds no graph."""
    if not graph.endswith(".json") or not os.path.isfile(graph):
        return False
    try:
        data = json.loads(Path(graph).read_bytes())
    except (ValueError, RecursionError):
        return True  # perhaps a plan that is cut short: an error says so when it is read
    has_graph = isinstance(data, dict) and bool({"nodes", "extends"} & data.keys())
    return not has_graph


def load(path: Path) -> Plan:
    """Return the plan in a file.

    Raises:
        GraphError: the file can't be read, or holds no plan as ``Plan.json`` writes it.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise fail("no-file", f"{path}: can't be read: {error.strerror}", None) from error
    except UnicodeDecodeError as error:
        law = f"{path} is not a plan: not UTF-8 text (byte {error.start})"
        raise fail("bad-plan", law, None, remedy=_plan_again(None)) from error


def parse(text: str, name: str = "plan") -> Plan:
    """Return the plan that ``Plan.json`` wrote as this text.

    Raises:
        GraphError: it is not JSON or not a plan, of another version, or changed since it was written.
    """
    fields = _fields(text, name)
    of_plan = {key: value for key, value in fields.items() if key not in ("version", "checksum")}
    written = present_plan(of_plan)
    try:
        plan = _adapter().validate_json(json.dumps(written), context=OPEN)
    except ValidationError as error:
        raise _bad(name, [_reason(item) for item in error.errors()]) from error
    if not re.fullmatch(GRAPH_NAME, plan.graph):
        raise _bad(name, ["`graph` is not a name, and files are named after it"])
    missing = [f"`{path}` is missing" for path in _missing_fields(written, plan.fields, "")]
    if missing:
        raise _bad(name, missing)
    if fields.get("checksum") != checksum(fields):
        law = f"{name} was changed after rlgraph wrote it (its checksum says so)"
        raise fail("bad-plan", law, None, remedy=f"change the graph, and {_plan_again(plan.origin)}")
    return plan


def compilation_of(request: PlanRequest, inline: bool) -> Compilation:
    """Return the compilation of what ``rlgraph run`` was given: a graph, or a saved plan.

    Args:
        request: names a graph or a saved plan, with settings for a graph alone.
        inline: plan one device per pool.

    Raises:
        GraphError: the file holds no plan.
        RunError: a saved plan was given with settings, or is not what its graph gives now.
    """
    if is_plan(request.graph):
        if request.overrides or request.devices or request.target:
            raise RunError(f"{request.graph} {SETTLED}")
        return compile_again(Path(request.graph), request.here)
    if inline:
        request = replace(request, devices=1)
    return Compilation(request)


def check_inline(compilation: Compilation) -> None:
    """Check that a plan runs in one process.

    Raises:
        RunError: it is for several devices in a pool.
    """
    plan = compilation.plan
    devices = max(plan.pools.values())
    if devices == 1:
        return
    law = f"{compilation.request.graph} is a plan for {devices} devices in a pool, and --inline runs on one"
    remedy = _plan_again(plan.origin and replace(plan.origin, devices=1))
    raise RunError(f"{law}\n  leave out --inline, or {remedy}")


def compile_again(path: Path, here: Here | None = None) -> Compilation:
    """Return the compilation of the graph that a saved plan was made from, with the saved plan as its plan.

    The graph has to give the same plan again.

    Raises:
        GraphError: the file holds no plan.
        RunError: the graph is not there any more or is wrong now, or it has changed, or gives another plan.
    """
    saved = load(path)
    origin = saved.origin
    if origin is None:
        raise RunError(f"{path} does not say which graph it was made from\n  {_plan_again(None)}")
    device = here().device if here else local_device()
    if origin.target and origin.target.cluster == "auto" and device != saved.device:
        law = f"{path} was made for the {saved.device} devices of the machine that planned it"
        law += f"; those of this one are {device}"
        raise RunError(f"{law}\n  run it there, or {_plan_again(origin)}")
    compilation = Compilation(PlanRequest.again(origin, saved.device, here))
    try:
        _check_same_graph(path, origin, compilation.tree)
        plan = compilation.plan
    except GraphError as error:
        law = f"{path} was made from {origin.graph}, which can't be planned now; paths are relative to here"
        problems = textwrap.indent(str(error), "  ")
        raise RunError(f"{law}\n{problems}\n  mend that, or {_plan_again(origin)}") from error
    changed = differences(saved, plan)
    if changed:
        if origin.rlgraph != version.VERSION:
            changed = [*changed, f"rlgraph {origin.rlgraph} made it; this is {version.VERSION}"]
        raise _refused(path, f"{origin.graph} gives another plan now", changed, origin)
    compilation.plan = saved if saved.open_values else _typed(saved)
    return compilation


def _typed(plan: Plan) -> Plan:
    """Return a plan with its attributes in the types that its ops declare; JSON has no tuples, say."""
    functions = {}
    for phase, by_node in plan.functions.items():
        functions[phase] = {node: _typed_function(function) for node, function in by_node.items()}
    return replace(plan, functions=functions)


def _typed_function(function: Function, kind: Any = None) -> Function:
    op = registry.load(function.target, kind=kind)
    hooks = {path: _typed_function(hook, op.hook(path)) for path, hook in function.hooks.items()}
    return replace(function, attributes=op.typed(function.attributes), hooks=hooks)


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of what ``Plan.json`` writes."""
    schema = _adapter().json_schema()
    _rename_steps(schema)
    definitions = [schema, *schema["$defs"].values()]
    records = [definition for definition in definitions if "properties" in definition]
    for record in records:
        record["required"] = [*record["properties"]]
        record["description"] = record["description"].replace("``", "`")
        for field in record["properties"].values():
            field.pop("default", None)
            field.pop("title", None)
    version = {"const": VERSION, "description": "Of this format."}
    checksum = {
        "type": "string",
        "description": "Of all the rest: a plan that was changed by hand is refused.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "A plan of rlgraph",
        "properties": {"version": version, **schema["properties"], "checksum": checksum},
        "required": ["version", *schema["required"], "checksum"],
    }


def _rename_steps(schema: dict[str, Any]) -> None:
    """Give the rows of steps the name that a reader of plan files knows them by."""
    definitions = schema["$defs"]
    definitions["Step"] = {**definitions.pop("StepRow"), "title": "Step"}
    schema["$defs"] = dict(sorted(definitions.items()))
    for name in ("steps", "eval_steps"):
        schema["properties"][name]["items"]["$ref"] = "#/$defs/Step"


@functools.cache
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def _fields(text: str, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        mark = Mark(Source(name, text), error.lineno, error.colno)
        law = f"the plan is cut short, or is not valid JSON here ({error.msg})"
        raise fail("bad-plan", law, mark, remedy=_plan_again(None)) from error
    except RecursionError:
        fields = None
    if not isinstance(fields, dict) or not {"version", "digest", "steps"} <= fields.keys():
        raise fail("bad-plan", f"{name} is not a plan of rlgraph", None, remedy=_plan_again(None))
    if fields["version"] != VERSION:
        law = f"{name} is a plan of version {json.dumps(fields['version'])}; this rlgraph reads {VERSION}"
        raise fail("bad-plan", law, None, remedy=_plan_again(None))
    return fields


def _bad(name: str, reasons: Sequence[str]) -> GraphError:
    law = f"{name} is not a plan that this rlgraph wrote: {'; '.join(reasons[:SHOWN])}"
    if len(reasons) > SHOWN:
        law += f", and {len(reasons) - SHOWN} more"
    return fail("bad-plan", law, None, remedy=_plan_again(None))


def _reason(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a field, from pydantic's error."""
    path = ""
    for word in error["loc"]:
        path += f"[{word}]" if isinstance(word, int) else f".{word}"
    path = path.removeprefix(".")
    if error["type"] == "missing":
        return f"`{path}` is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"`{path}` is not a field of a plan"
    message = error["msg"]
    return f"`{path}`: {message[:1].lower()}{message[1:]}"


def _missing_fields(written: Any, filled: Any, path: str) -> Iterator[str]:
    """Yield the paths of fields that were filled in by their defaults."""
    if isinstance(filled, Mapping):
        for name, value in filled.items():
            inner = f"{path}.{name}" if path else name
            if name in written:
                yield from _missing_fields(written[name], value, inner)
            else:
                yield inner
    elif isinstance(filled, list | tuple):
        for number, (item, value) in enumerate(zip(written, filled, strict=True)):
            yield from _missing_fields(item, value, f"{path}[{number}]")


def _check_same_graph(path: Path, origin: Origin, tree: Tree) -> None:
    """Check that the graph of a plan is as it was, but for what it says about itself."""
    old_tree = _without_about(Tree.of(origin.composed))
    edits = diff_text(old_tree, _without_about(tree.written()))
    if edits:
        law = f"the graph that it was made from, {origin.graph}, has changed"
        raise _refused(path, law, edits.splitlines(), origin)


def _without_about(tree: Tree) -> Tree:
    return tree.with_item("about", None) if tree.get("about") else tree


def _refused(path: Path, law: str, changed: Sequence[str], origin: Origin) -> RunError:
    text = f"{path} is not run: {law}"
    for line in (*changed, f"undo that, or {_plan_again(origin)}"):
        text += f"\n  {line}"
    return RunError(text)


def _plan_again(origin: Origin | None) -> str:
    """Return the command that plans again."""
    words = "GRAPH"
    if origin:
        words = shlex.join([origin.graph, *origin.overrides, *_options(origin)])
    return f"plan again: rlgraph plan {words} -o plan.json"


def _options(origin: Origin) -> list[str]:
    """Return the options that say what a plan was made for."""
    target = origin.target
    if target is None:
        return ["--devices", str(origin.devices)]
    options = ["--cluster", target.cluster]
    for name, value in vars(target).items():
        if isinstance(value, float | int):
            options += [f"--{name.replace('_', '-')}", f"{value:g}"]
    for name, share in target.kept_rows.items():
        options += ["--kept-rows", f"{name}={share:g}" if name else f"{share:g}"]
    if isinstance(target.response_tokens, Mapping):
        lengths = (f"{name}={tokens:g}" for name, tokens in target.response_tokens.items())
        options += ["--response-tokens", ",".join(lengths)]
    if target.calibration:
        options += ["--calibration", target.calibration]
    return options
