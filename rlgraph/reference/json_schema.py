"""The graph language as one JSON Schema (draft 2020-12), for completion, hover and checks in editors.

It is made from the declarations that ``rlgraph check`` uses: the records in ``rlgraph/syntax``, and the
ops' and losses' signatures and docstrings. It knows one value at a time; edges, domains, versions and the
names of models are left to ``rlgraph check``.

    nodes.NAME ── op: rollout ──> #/$defs/op.rollout        if/then, one for each op
                  op: my_ops.py:f ──> #/$defs/custom        open: its file is not read
        loss ──── kind: sft ────> #/$defs/loss.sft
"""

from collections.abc import Mapping

from rlgraph.frontend.bind_call import joins
from rlgraph.nodes import HOOKS, OPS
from rlgraph.ops.declare import Hook, Op, Port
from rlgraph.reference import schema_parts as parts
from rlgraph.reference.describe import OpEntry, attribute_schemas, entry_of, find
from rlgraph.reference.schema_parts import OPEN, PARTS, Schema, ref
from rlgraph.syntax.settings import GraphFile, Refill

FUNCTION = r"\.py:\w+$"
LATER = " NAME@next is the version after its update."
KEYS, COLUMN, MODEL = PARTS["keys"], PARTS["column"], PARTS["model"]
DEFAULTS_OR_MAP = {"type": ["object", "boolean", "string"], "pattern": OPEN}  # true: all defaults
FRAGMENT = {"not": {"anyOf": [{"required": [name]} for name in ("graph", "extends", "use")]}}


def graph_schema() -> Schema:
    """Return the schema of a graph file; ``???`` and ``${...}`` stand for any value."""
    root = GraphFile.model_json_schema()
    definitions = {name: parts.section_schema(part) for name, part in root.pop("$defs").items()}
    of_eval = definitions["Eval"]["properties"]
    of_eval["nodes"] = parts.by_name(ref("changed"), of_eval["nodes"])
    properties = parts.section_schema(root)["properties"]
    for name in ("models", "nodes", "pools"):
        inner = ref("node") if name == "nodes" else properties[name]["additionalProperties"]
        properties[name] = parts.by_name(inner, properties[name])
    properties["edits"]["items"] = ref("edit")
    for name in {*properties} - {"seed"}:
        properties[name].pop("default", None)
        del properties[name]["markdownDescription"]  # the description is of that default
    rate = definitions["Optimizer"]["properties"]
    rate["lr"] = parts.changing(rate["lr"])
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A graph of rlgraph",
        "description": root["description"].replace("``", "`"),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "if": {"anyOf": [{"required": ["extends"]}, {"not": {"required": ["graph"]}}]},
        "then": {
            "propertyNames": {"enum": ["graph", "about", "extends", "use", "edits"]},
            "anyOf": [{"required": ["graph", "extends"]}, {"required": ["edits"], **FRAGMENT}],
        },
        "else": {"required": ["graph", "nodes", "schedule"], "not": {"required": ["edits"]}},
        "$defs": definitions | _node_definitions() | {"edit": parts.edit_schema(properties, definitions)},
    }
    return {**parts.marked_down(schema)}


def _node_definitions() -> dict[str, Schema]:
    definitions = {
        **PARTS["definitions"],
        "op": _choice({name: f"op.{name}" for name in OPS}, "The op that the node runs", "an op"),
        "node": _by_name("op", [*OPS], "op.", "custom", "op"),
        "refill": parts.section_schema(Refill.model_json_schema()) | DEFAULTS_OR_MAP,
    }
    for word, hooks in HOOKS.items():
        definitions[f"{word}_kind"] = _choice(hooks, f"Which {word}", f"a {word}")
        definitions[word] = _by_name("kind", [*hooks], f"{word}.", f"custom_{word}", f"{word}_kind")
        definitions[f"custom_{word}"] = {"type": "object", "properties": {"kind": {}}}
        for name in hooks:
            definitions[f"{word}.{name}"] = _function("kind", name)
    for name in OPS:
        definitions[f"op.{name}"] = _function("op", name)
    insertable = [name for name in OPS if find(name).inputs and len(find(name).outputs) == 1]
    definitions["inserted"] = _by_name("op", insertable, "inserted.", "custom", "op")
    for name in insertable:
        definitions[f"inserted.{name}"] = _inserted(name, definitions[f"op.{name}"])
    return definitions


def _function(key: str, name: str) -> Schema:
    """Return the schema of a node of one op, or of a hook: every key that may stand in it."""
    op, entry = find(name), entry_of(name)
    keys = {key: {}, **_model_keys(op), **_attributes(op, entry)}
    if not op.kind:
        keys |= _edges(op)
    required = [attribute for attribute, field in op.attributes.model_fields.items() if field.is_required()]
    if op.engine is not None or op.declared.recorded:
        required.append("model")
    return {**_document(entry), "properties": keys, "required": required, "additionalProperties": False}


def _inserted(name: str, node: Schema) -> Schema:
    """Return the schema of a node under ``insert``: one with the column that it is put on."""
    properties = {key: ref(f"op.{name}/properties/{key}") for key in node["properties"]}
    on = {"type": "string", "description": "The column that it is put on: its readers now read this node's."}
    return {**node, "properties": {**properties, "on": on}, "required": [*node["required"], "on"]}


def _attributes(op: Op, entry: OpEntry) -> dict[str, Schema]:
    schemas = attribute_schemas(op)
    attributes = {}
    for name, kind, default, text in entry.attributes:
        if name in op.structural:
            schema = parts.opened(schemas[name])
        elif name in op.hooks:
            schema = _hooks(op, name)
        else:
            adapts = not op.kind and name in op.declared.measures
            schema = parts.changing(parts.opened(schemas[name]), adapts)
        attributes[name] = {**schema, **parts.described(text, kind, default)}
    return attributes


def _hooks(op: Op, name: str) -> Schema:
    """Return the schema of a hook, or of several by name; null is accepted if there may be none."""
    hook = ref(op.hooks[name].word)
    hooks = {"type": "object", "additionalProperties": hook} if name in op.several else hook
    if op.attributes.model_fields[name].is_required():
        return hooks
    return {"anyOf": [hooks, {"type": "null"}, ref("open")], "default": None}


def _model_keys(op: Op) -> dict[str, Schema]:
    keys = {}
    if op.engine:
        text = "The model, by its name in `models`"
        if not op.copies:
            text += f"; it needs head {op.declared.head}"
        text += "."
        if not op.declared.updates:
            text += LATER
        keys["model"] = {**MODEL, "description": text}
    if op.declared.recorded:
        keys["model"] = {**MODEL, "description": "The model that sampled the rows, by its name in `models`."}
    return keys | _chosen(of=op.copies, tokenizer="tokenizer" in op.handles.values())


def _edges(op: Op) -> dict[str, Schema]:
    """Return the schema of ``in`` and ``out``, with the op's names for its columns, and of further keys."""
    edges = {}
    inputs = {port.name: port for port in op.inputs}
    for kind in op.hooks.values():
        if kind.reads:
            inputs |= _columns_of_hooks(kind)
    if inputs:
        edges["in"] = _columns(inputs, "in", bool(op.hooks or op.more))
    if op.outputs:
        outputs = {port.name: port for port in op.outputs if port.name}
        edges["out"] = _columns(outputs, "out", not outputs)
    edges |= _chosen(rows=not op.source, state=op.declared.state == "reads", joins=joins(op))
    return edges | _chosen(refill=op.declared.filters, every=True, **{"from": True}, pool=not op.engine)


def _columns_of_hooks(kind: type[Hook]) -> dict[str, Port]:
    """Return the columns that shipped hooks of a kind read, without those that their op computes."""
    ports = {}
    for name in HOOKS[kind.word]:
        for port in find(name).inputs:
            if port.name not in kind.provides:
                ports[port.name] = port
    return ports


def _chosen(**keys: bool) -> dict[str, Schema]:
    return {key: KEYS[key] for key, applies in keys.items() if applies}


def _columns(ports: Mapping[str, Port], key: str, more: bool) -> Schema:
    properties = {
        name: {**COLUMN, "description": f"A column of {port.type}."} for name, port in ports.items()
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": COLUMN if more else False}
    return {**parts.opened(schema), **PARTS[key]}


def _choice(shipped: Mapping[str, str], what: str, custom: str) -> Schema:
    """Return the schema of a shipped name, each with its documentation, or of a function in a file."""
    options = [{"const": name, **_document(entry_of(name))} for name in shipped]
    in_file = {"type": "string", "pattern": FUNCTION, "description": f"{custom} in a file: `my_ops.py:name`."}
    return {"description": f"{what}; `rlgraph nodes` lists them.", "anyOf": [*options, in_file, ref("open")]}


def _by_name(key: str, shipped: list[str], prefix: str, custom: str, choice: str) -> Schema:
    """Return the schema of a mapping whose other keys depend on one: an if/then for each of its values."""
    cases = [{"if": _has(key, {"const": name}), "then": ref(f"{prefix}{name}")} for name in shipped]
    cases.append({"if": _has(key, {"type": "string", "pattern": FUNCTION}), "then": ref(custom)})
    return {
        "type": ["object", "string"],
        "pattern": OPEN,
        "properties": {key: ref(choice)},
        "required": [key],
        "allOf": cases,
    }


def _has(key: str, value: Schema) -> Schema:
    return {"type": "object", "properties": {key: value}, "required": [key]}


def _document(entry: OpEntry) -> Schema:
    doc = entry.doc
    blocks = [doc.summary, doc.body]
    if doc.example:
        blocks.append(f"```yaml\n{doc.example}\n```")
    return {"description": doc.summary, "markdownDescription": "\n\n".join(filter(None, blocks))}
