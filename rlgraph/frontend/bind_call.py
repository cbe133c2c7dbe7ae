"""Binds what a node calls: its op and its hooks by name, their attributes, and the columns that it maps.

Edits bind by it too, with a binder that is not strict: they ask for edges, and leave values to the graph.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
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
from rlgraph.records import dataclass
from rlgraph.syntax.shipped_files import graphs_folder
from rlgraph.syntax.source import OPEN, Tree
from rlgraph.syntax.validate import NAME, NODE_KEYS, Binder, validate
from rlgraph.syntax.yaml_text import flow
from rlgraph.variables import with_values

NO_NAME = "`{}` is not a name: letters, digits and _, not starting with a digit"
KEYS = ("every", "from")  # these say in which iterations a node runs


def joins(op: Op) -> bool:
    """Return whether an op's loss may be added to the optimizer steps of another."""
    return op.declared.updates and not op.copies


@dataclass(frozen=True)
class OpKey:
    """A key that nodes of only some ops have.

    Attributes:
        applies: whether nodes of an op have it.
        problem: the kind of problem that it is for a node of another op.
        law: of this problem; ``{node}`` and ``{op}`` stand for the names.
    """

    applies: Callable[[Op], bool]
    problem: str
    law: str


OP_KEYS = {
    "model": OpKey(
        lambda op: op.engine is not None or op.declared.recorded, "model-unused", "op {op} reads no model"
    ),
    "state": OpKey(
        lambda op: op.declared.state == "reads", "no-state", "op {op} reads no other node's state"
    ),
    "of": OpKey(lambda op: op.copies, "of-unused", "op {op} copies no weights"),
    "joins": OpKey(
        joins,
        "joins-no-update",
        "`{node}` joins the optimizer steps of an update; op {op} has no loss",
    ),
    "refill": OpKey(
        lambda op: op.declared.filters,
        "refill-of-no-filter",
        "`refill` of node `{node}`: op {op} is not a filter",
    ),
}


def applies(key: str, name: str, tree: Tree, op: Op, binder: Binder) -> bool:
    """Return whether nodes of an op have a key of ``OP_KEYS``; note it of one that has it and should not."""
    rule = OP_KEYS[key]
    if rule.applies(op):
        return True
    item = tree.get(key)
    if item:
        law = rule.law.format(node=name, op=op.name)
        binder.problem(rule.problem, law, item.key, remedy=f"remove `{key}`")
    return False


def bind_call(name: str, tree: Tree, binder: Binder) -> tuple[Call, dict[str, Call]] | None:
    """Return the function that a node calls and its hooks, with attributes; None where it names no op.

    Raises:
        GraphError: there is no such op or hook, and the binder is not strict.
    """
    item = tree.get("op")
    if item is None or not isinstance(item.value, str):
        _names_no_op(name, tree, binder)
        return None
    op_and_target = binder.attempt(find_op, item.value, item.mark)
    if op_and_target is None:
        return None
    op, target = op_and_target

    hooks = {}
    for path, kind, hook_tree in hooked(op, tree):
        hook = _hook(f"{name}.{path}", kind, hook_tree, binder)
        if hook:
            hooks[path] = hook

    section = _without(tree, NODE_KEYS)
    attributes, courses = _attributes(name, section, op, binder, f"op {op.name}", _accepted(op))
    if attributes is None:
        attributes = _defaults(op)  # its edges are checked all the same

    op = _with_outputs(name, op, attributes, tree, binder)
    further = op.further(attributes)
    if further:
        op = replace(op, inputs=op.inputs + further)
    return Call(op, target, attributes, courses=courses), hooks


def _names_no_op(name: str, tree: Tree, binder: Binder) -> None:
    law = f"node `{name}` does not say what it is"
    remedy = f"{name}: {{op: ...}}; see `rlgraph nodes`"
    if tree.items and tree.get("op") is None:  # it may be meant as a change of another graph's node
        key, child = next(iter(tree.items.items()))
        remedy += f"; of a node that is there, set: {{{name}.{key}: {flow(child)}}}"
    binder.problem("no-op", law, tree.key or tree.mark, remedy=remedy)


def _without(tree: Tree, keys: Collection[str]) -> Tree:
    items = {name: child for name, child in tree.items.items() if name not in keys}
    return replace(tree, value=items)


def _defaults(op: Op) -> dict[str, Any]:
    """Return the attributes of an op by default; None for those that have to be given."""
    defaults = {}
    for name, spec in op.attributes.model_fields.items():
        defaults[name] = None if spec.is_required() else spec.get_default()
    return defaults


def _hook(path: str, hook: type[Hook], tree: Tree, binder: Binder) -> Call | None:
    if not tree.is_map:
        return None
    kind = tree.get("kind")
    if kind is None or not isinstance(kind.value, str):
        law = f"`{path}` does not say its `kind`"
        example = next(iter(HOOKS[hook.word]))
        binder.problem("no-kind", law, tree.key or tree.mark, remedy=f"as {{kind: {example}}}")
        return None
    if kind.value == OPEN:
        return None
    hook_and_target = binder.attempt(find_hook, hook, kind.value, kind.mark)
    if hook_and_target is None:
        return None
    op, target = hook_and_target
    ins = tree.get("in")
    if ins:
        law = f"`{path}` has no `in`: its node maps the columns that a {hook.word} reads"
        remedy = f"leave out {path}.in, and set: {{{path.partition('.')[0]}.in: {flow(ins)}}}"
        binder.problem("unknown-attribute", law, ins.key, remedy=remedy)
    section = _without(tree, ("kind", "in"))
    attributes, courses = _attributes(path, section, op, binder, f"{hook.word} {op.name}")
    return Call(op, target, attributes or {}, courses=courses)


def _accepted(op: Op) -> tuple[str, ...]:
    """Return the keys that an op's nodes may have beside its attributes."""
    keys = ["in", "out", "rows", "pool", *KEYS]
    if op.engine:  # its node runs where the model's engine is
        keys = ["model", "in", "out", "rows", *KEYS]
    for key, rule in OP_KEYS.items():
        if key not in keys and rule.applies(op):
            keys.append(key)
    return tuple(keys)


def _attributes(
    path: str, tree: Tree, op: Op, binder: Binder, reader: str, keys: tuple[str, ...] = ()
) -> tuple[dict[str, Any] | None, dict[str, Varying]]:
    """Return every attribute's value, or None with the problems noted, and the courses of some."""
    if not binder.strict:
        return _unchecked(op, tree), {}
    measures = {} if op.kind else op.declared.measures  # a hook records no metrics of its own
    tree, courses = take_courses(op.attributes, tree, path, binder, reader, op.structural, measures)
    values = validate(op.attributes, tree, path, binder, reader, keys, partial(_relatives, op))
    if values is None:
        return None, {}
    attributes = {}
    for name in op.attributes.model_fields:
        is_hook_of_node = not op.kind and name in op.hooks
        if not is_hook_of_node:
            attributes[name] = getattr(values, name)
    # paths are relative to the file that they stand in; of functions in files workers are told the place
    for name, item in _marked(PathMarker, op, tree):
        attributes[name] = item.mapped(_resolved).plain()
    for name, item in _marked(FunctionMarker, op, tree):
        if item.value != OPEN:
            attributes[name] = binder.attempt(find_function, item.value, "function", item.mark)
    return attributes, courses


def _unchecked(op: Op, tree: Tree) -> dict[str, Any]:
    """Return the values of attributes as they are in the graph, and defaults for the others."""
    fields = op.attributes.model_fields
    attributes = {name: spec.default for name, spec in fields.items() if not spec.is_required()}
    for name, child in tree.items.items():
        if name in fields:
            attributes[name] = child.plain()
    return attributes


def _relatives(op: Op, attribute: str) -> str:
    """Return which shipped ops have an attribute, of those whose names begin as an op's; or nothing."""
    if op.kind:
        return ""
    family = op.name.split(".")[0]
    relatives = []
    for name in OPS:
        if name.split(".")[0] == family and attribute in load(OPS[name]).attributes.model_fields:
            relatives.append(name)
    if not relatives:
        return ""
    verb = "have" if len(relatives) > 1 else "has"
    return f"{' and '.join(relatives)} {verb} it"


def _with_outputs(name: str, op: Op, attributes: Mapping[str, Any], tree: Tree, binder: Binder) -> Op:
    """Return an op with the columns that its attributes ask for, one of which may name others with types."""
    outputs = op.written(attributes)
    written_anyway = {port.name for port in outputs}
    attribute = op.declared.columns
    value = attributes.get(attribute)
    columns = value if isinstance(value, Mapping) else {}  # none, or still open
    place = f"{name}.{attribute}"
    for column, declared in columns.items():
        mark = tree.at((attribute, column)).mark
        port = _typed_port(op, column, declared, f"{place}.{column}", mark, binder)
        if not NAME.match(column):
            binder.problem("bad-name", NO_NAME.format(column), mark)
        if column in written_anyway:
            law = f"`{place}` names `{column}`, which op {op.name} writes anyway"
            binder.problem("two-writers", law, mark, remedy=f"remove {place}.{column}")
        elif port:
            outputs += (port,)
    return op if outputs == op.outputs else replace(op, outputs=outputs)


def _typed_port(op: Op, column: str, declared: Any, place: str, mark: Mark, binder: Binder) -> Port | None:
    """Return the port of a column that an attribute names with a type; None where it is not a type."""
    domain = op.declared.makes or ""
    if not domain and op.outputs:
        domain = op.outputs[0].type.domain
    if isinstance(declared, Mapping):
        declared = declared.get("type", "text")
    text = str(declared)
    try:
        kind = ColumnType.parse(text, domain)
        if kind.domain != domain:
            raise ValueError(f"{kind} is not of {domain}, of which op {op.name} makes rows")
    except ValueError as error:
        binder.problem("wrong-value", f"`{place}`: {error}", mark, (), nearest(text, DTYPES))
        return None
    return Port(column, kind)


def _marked(marker: type, op: Op, tree: Tree) -> Iterator[tuple[str, Tree]]:
    for name, spec in op.attributes.model_fields.items():
        item = tree.get(name)
        if item and holds(marker, spec.annotation, *spec.metadata):
            yield name, item


def _resolved(leaf: Tree) -> Tree:
    if not isinstance(leaf.value, str):
        return leaf
    return replace(leaf, value=resolved(leaf.value, leaf.mark))


def names(tree: Tree, key: str, binder: Binder) -> dict[str, str]:
    """Return the columns that a node maps its op's names to, in ``in`` or ``out``."""
    item = tree.get(key)
    if item is None:
        return {}
    are_texts = all(isinstance(child.value, str) for child in item.items.values())
    if not item.is_map or not are_texts:
        law = f"`{key}` maps the op's names to columns, as {{rewards: shaped}}"
        binder.problem("wrong-type", law, item.mark)
        return {}
    columns = {}
    for name, child in item.items.items():
        columns[name] = child.value
        if not NAME.match(child.value):
            binder.problem("bad-name", NO_NAME.format(child.value), child.mark)
    return columns


def resolved(path: str, mark: Mark) -> str:
    """Return a path relative to the file in which it is written.

    In a shipped graph and on the command line it is relative to the working directory. A URL and an absolute
    path stay as they are.
    """
    value = with_values(path)
    is_fixed = "://" in value or Path(value).is_absolute()
    if path == OPEN or is_fixed:
        return path
    folder = mark.source.base
    if folder == graphs_folder():
        return str(Path(path))
    return str(folder / path)
