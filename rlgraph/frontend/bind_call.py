"""Binds what a node calls: its op and its hooks by name, their attributes, and the columns that it maps.

Edits bind by it too, with a binder that is not strict: they ask for edges, and leave values to the graph.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlgraph.errors import Mark, nearest
from rlgraph.frontend.ports import hooked
from rlgraph.ir.graph import Call
from rlgraph.ir.schedules import Varying, take_courses
from rlgraph.nodes import HOOKS, OPS
from rlgraph.ops.column_types import DTYPES, ColumnType, FunctionMarker, PathMarker, holds
from rlgraph.ops.declare import Hook, Op, Port
from rlgraph.ops.registry import find_function, find_hook, find_op, load
from rlgraph.syntax.shipped_files import graphs_folder
from rlgraph.syntax.source import OPEN, Tree
from rlgraph.syntax.validate import NAME, NODE_KEYS, Binder, validate
from rlgraph.syntax.yaml_text import flow
from rlgraph.variables import with_values

KEYS = ("every", "from")  # these say in which iterations a node runs


def bind_call(name: str, tree: Tree, binder: Binder) -> tuple[Call, dict[str, Call]] | None:
    """Return the function that a node calls and its hooks, with attributes; None where it names no op.

    Raises:
        GraphError: there is no such op or hook, and the binder is not strict.
    """
    named = tree.get("op")
    if named is None or not isinstance(named.value, str):
        law, remedy = f"node `{name}` does not say what it is", f"{name}: {{op: ...}}; see `rlgraph nodes`"
        if tree.is_map and tree.items and not named:
            key, child = next(iter(tree.items.items()))
            remedy += f"; of a node that is there, set: {{{name}.{key}: {flow(child)}}}"
        binder.problem("no-op", law, tree.key or tree.mark, remedy=remedy)
        return None
    op, target = binder.attempt(find_op, named.value, named.mark) or (None, "")
    if op is None:
        return None
    hooks = {n: h for n, kind, item in hooked(op, tree) if (h := _hook(f"{name}.{n}", kind, item, binder))}
    rest = replace(tree, value={n: t for n, t in tree.items.items() if n not in NODE_KEYS})
    attributes, courses = _attributes(name, rest, op, binder, f"op {op.name}", _accepted(op))
    if attributes is None:
        fields = op.attributes.model_fields.items()
        attributes = {n: None if spec.is_required() else spec.get_default() for n, spec in fields}
    op = _with_outputs(name, op, attributes, tree, binder)
    if further := op.further(attributes):
        op = replace(op, inputs=op.inputs + further)
    return Call(op, target, attributes, courses=courses), hooks


def _hook(path: str, hook: type[Hook], tree: Tree, binder: Binder) -> Call | None:
    kind = tree.get("kind")
    if not tree.is_map or (kind and kind.value == OPEN):
        return None
    if kind is None or not isinstance(kind.value, str):
        law, remedy = f"`{path}` does not say its `kind`", f"as {{kind: {next(iter(HOOKS[hook.word]))}}}"
        binder.problem("no-kind", law, tree.key or tree.mark, remedy=remedy)
        return None
    op, target = binder.attempt(find_hook, hook, kind.value, kind.mark) or (None, "")
    if op is None:
        return None
    rest = replace(tree, value={n: t for n, t in tree.items.items() if n not in ("kind", "in")})
    if ins := tree.get("in"):
        law = f"`{path}` has no `in`: its node maps the columns that a {hook.word} reads"
        remedy = f"set: {{{path.partition('.')[0]}.in: {flow(ins)}}}"
        binder.problem("unknown-attribute", law, ins.key, remedy=remedy)
    attributes, courses = _attributes(path, rest, op, binder, f"{hook.word} {op.name}")
    return Call(op, target, attributes or {}, courses=courses)


def _accepted(op: Op) -> tuple[str, ...]:
    """Return the keys that an op's nodes may have beside its attributes."""
    keys = ("model", "in", "out", "rows", *KEYS) if op.engine else ("in", "out", "rows", "pool", *KEYS)
    further = {
        "model": op.declared.recorded,
        "state": op.declared.state == "reads",
        "of": op.copies,
        "joins": joins(op),
        "refill": op.declared.filters,
    }
    return (*keys, *(key for key, applies in further.items() if applies))


def joins(op: Op) -> bool:
    """Return whether an op's loss may be added to the optimizer steps of another."""
    return op.declared.updates and not op.copies


def _attributes(
    path: str, tree: Tree, op: Op, binder: Binder, what: str, keys: tuple[str, ...] = ()
) -> tuple[dict[str, Any] | None, dict[str, Varying]]:
    """Return every attribute's value, or None with the problems noted, and the courses of some."""
    fields = op.attributes.model_fields
    if not binder.strict:  # what was given stands over the defaults
        written = {n: child.plain() for n, child in tree.items.items() if n in fields}
        return {n: field.default for n, field in fields.items() if not field.is_required()} | written, {}
    measures = {} if op.kind else op.declared.measures  # a hook records no metrics of its own
    tree, courses = take_courses(op.attributes, tree, path, binder, what, op.structural, measures)
    values = validate(op.attributes, tree, path, binder, what, keys, partial(_relatives, op))
    if values is None:
        return None, {}
    own = {n: getattr(values, n) for n in fields if op.kind or n not in op.hooks}
    # paths are relative to the file that they stand in; of functions in files workers are told the place
    own |= {n: item.mapped(_resolved).plain() for n, item in _marked(PathMarker, op, tree)}
    given = [(n, item) for n, item in _marked(FunctionMarker, op, tree) if item.value != OPEN]
    own |= {n: binder.attempt(find_function, item.value, "function", item.mark) for n, item in given}
    return own, courses


def _relatives(op: Op, attribute: str) -> str:
    """Return which shipped ops have an attribute, of those whose names begin as an op's; or nothing."""
    family = (name for name in OPS if not op.kind and name.split(".")[0] == op.name.split(".")[0])
    having = [name for name in family if attribute in load(OPS[name]).attributes.model_fields]
    return f"{' and '.join(having)} {'have' if having[1:] else 'has'} it" if having else ""


def _with_outputs(name: str, op: Op, attributes: Mapping[str, Any], tree: Tree, binder: Binder) -> Op:
    """Return an op with the columns that its attributes ask for, one of which may name others with types."""
    outputs = op.written(attributes)
    own, ports = {port.name for port in outputs}, list[Port]()
    columns = attributes.get(attribute := op.declared.columns)
    domain = op.declared.makes or next((port.type.domain for port in op.outputs), "")  # it writes one row per
    for column, said in (columns if isinstance(columns, Mapping) else {}).items():
        place, mark = f"{name}.{attribute}", tree.at((attribute, column)).mark
        text = str(said.get("type", "text") if isinstance(said, Mapping) else said)
        try:
            ports.append(Port(column, kind := ColumnType.parse(text, domain)))
            if kind.domain != domain:
                raise ValueError(f"{kind} is not of {domain}, of which op {op.name} makes rows")
        except ValueError as error:
            binder.problem("wrong-value", f"`{place}.{column}`: {error}", mark, (), nearest(text, DTYPES))
        if not NAME.match(column):
            law = f"`{column}` is no name: letters, digits and _, not starting with a digit"
            binder.problem("bad-name", law, mark)
        if column in own:
            law = f"`{place}` names `{column}`, which op {op.name} writes anyway"
            binder.problem("two-writers", law, mark, remedy=f"remove {place}.{column}")
    outputs += tuple(port for port in ports if port.name not in own)
    return op if outputs == op.outputs else replace(op, outputs=outputs)


def _marked(marker: type, op: Op, tree: Tree) -> Iterator[tuple[str, Tree]]:
    for name, spec in op.attributes.model_fields.items():
        if holds(marker, spec.annotation, *spec.metadata) and (item := tree.get(name)):
            yield name, item


def _resolved(leaf: Tree) -> Tree:
    return replace(leaf, value=resolved(leaf.value, leaf.mark)) if isinstance(leaf.value, str) else leaf


def names(tree: Tree, key: str, binder: Binder) -> dict[str, str]:
    item = tree.get(key)
    if item is None:
        return {}
    if not item.is_map or not all(isinstance(child.value, str) for child in item.items.values()):
        law = f"`{key}` maps the op's names to columns, as {{rewards: shaped}}"
        binder.problem("wrong-type", law, item.mark)
        return {}
    for child in item.items.values():
        if not NAME.match(child.value):
            law = f"`{child.value}` is no name: letters, digits and _, not starting with a digit"
            binder.problem("bad-name", law, child.mark)
    return {name: child.value for name, child in item.items.items()}


def resolved(path: str, mark: Mark) -> str:
    """Return a path relative to the file in which it is written.

    In a shipped graph and on the command line it is relative to the working directory. A URL and an absolute
    path stay as they are.
    """
    value = with_values(path)
    if path == OPEN or "://" in value or Path(value).is_absolute():
        return path
    origin = Path(mark.source.name)
    shipped = origin.parent == graphs_folder() or mark.source.name == "command line"
    return str(Path(path) if shipped else origin.parent / path)
