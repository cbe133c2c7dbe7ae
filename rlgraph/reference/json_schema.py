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
from rlgraph.ops.declare import Op, Port
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
    definitions = {name: parts.told(part) for name, part in root.pop("$defs").items()}
    of_eval = definitions["Eval"]["properties"]
    of_eval["nodes"] = parts.named(ref("changed"), of_eval["nodes"])
    properties = parts.told(root)["properties"]
    for name in ("models", "nodes", "pools"):
        inner = ref("node") if name == "nodes" else properties[name]["additionalProperties"]
        properties[name] = parts.named(inner, properties[name])
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
        "op": _choice({name: f"op.{name}" for name in OPS}, "Which op the node runs", "an op"),
        "node": _by_name("op", [*OPS], "op.", "custom", "op"),
        "refill": parts.told(Refill.model_json_schema()) | DEFAULTS_OR_MAP,
    }
    for word, known in HOOKS.items():
        definitions[f"{word}_kind"] = _choice(known, f"Which {word}", f"a {word}")
        definitions[word] = _by_name("kind", [*known], f"{word}.", f"custom_{word}", f"{word}_kind")
        definitions[f"custom_{word}"] = {"type": "object", "properties": {"kind": {}}}
        definitions |= {f"{word}.{name}": _function("kind", name) for name in known}
    definitions |= {f"op.{name}": _function("op", name) for name in OPS}
    spliced = [name for name in OPS if find(name).inputs and len(find(name).outputs) == 1]
    definitions["inserted"] = _by_name("op", spliced, "inserted.", "custom", "op")
    return definitions | {f"inserted.{name}": _inserted(name, definitions[f"op.{name}"]) for name in spliced}


def _function(key: str, name: str) -> Schema:
    """Return the schema of a node of one op, or of a hook: every key that may stand in it."""
    op, entry = find(name), entry_of(name)
    keys = {key: {}, **_model_keys(op), **_attributes(op, entry), **({} if op.kind else _edges(op))}
    needed = [attribute for attribute, field in op.attributes.model_fields.items() if field.is_required()]
    needed += ["model"] * (op.engine is not None or op.declared.recorded)
    return {**_document(entry), "properties": keys, "required": needed, "additionalProperties": False}


def _inserted(name: str, node: Schema) -> Schema:
    """Return the schema of a node under ``insert``: one with the column that it is put on."""
    properties = {key: ref(f"op.{name}/properties/{key}") for key in node["properties"]}
    on = {"type": "string", "description": "The column that it is put on: whoever read it reads this node's."}
    return {**node, "properties": {**properties, "on": on}, "required": [*node["required"], "on"]}


def _attributes(op: Op, entry: OpEntry) -> dict[str, Schema]:
    schemas, attributes = attribute_schemas(op), {}
    for name, kind, default, text in entry.attributes:
        adapts = not op.kind and name in op.declared.measures
        schema = _hooks(op, name) if name in op.hooks else parts.changing(parts.opened(schemas[name]), adapts)
        if name in op.structural:
            schema = parts.opened(schemas[name])
        attributes[name] = {**schema, **parts.said(text, kind, default)}
    return attributes


def _hooks(op: Op, name: str) -> Schema:
    """Return the schema of a hook, or several by name; null where there may be none."""
    one = ref(op.hooks[name].word)
    hooks = {"type": "object", "additionalProperties": one} if name in op.several else one
    if op.attributes.model_fields[name].is_required():
        return hooks
    return {"anyOf": [hooks, {"type": "null"}, ref("open")], "default": None}


def _model_keys(op: Op) -> dict[str, Schema]:
    keys = {}
    if op.engine:
        head = "" if op.copies else f"; it needs head {op.declared.head}"
        later = LATER * (not op.declared.updates)
        keys["model"] = {**MODEL, "description": f"The model, by its name in `models`{head}.{later}"}
    if op.declared.recorded:
        keys["model"] = {**MODEL, "description": "The model that sampled the rows, by its name in `models`."}
    return keys | _chosen(of=op.copies, tokenizer="tokenizer" in op.handles.values())


def _edges(op: Op) -> dict[str, Schema]:
    """Return the schema of ``in`` and ``out``, with the op's names of its columns, and of what else a node of
    it may have."""
    edges = {}
    ports = {port.name: port for port in op.inputs}
    for kind in op.hooks.values():
        shipped = [find(name) for name in HOOKS[kind.word]] if kind.reads else []
        ports |= {p.name: p for hook in shipped for p in hook.inputs if p.name not in kind.provides}
    if ports:
        edges["in"] = _columns(ports, "in", bool(op.hooks or op.more))
    if op.outputs:
        outs = {port.name: port for port in op.outputs if port.name}
        edges["out"] = _columns(outs, "out", not outs)
    edges |= _chosen(rows=not op.source, state=op.declared.state == "reads", joins=joins(op))
    return edges | _chosen(refill=op.declared.filters, every=True, **{"from": True}, pool=not op.engine)


def _chosen(**keys: bool) -> dict[str, Schema]:
    return {key: KEYS[key] for key, applies in keys.items() if applies}


def _columns(ports: Mapping[str, Port], key: str, more: bool) -> Schema:
    properties = {n: {**COLUMN, "description": f"A column of {port.type}."} for n, port in ports.items()}
    schema = {"type": "object", "properties": properties, "additionalProperties": COLUMN if more else False}
    return {**parts.opened(schema), **PARTS[key]}


def _choice(known: Mapping[str, str], what: str, one: str) -> Schema:
    """Return the schema of a shipped name, each with its documentation, or a function in a file."""
    options = [{"const": name, **_document(entry_of(name))} for name in known]
    own = {"type": "string", "pattern": FUNCTION, "description": f"{one} in a file: `my_ops.py:name`."}
    return {"description": f"{what}; `rlgraph nodes` lists them.", "anyOf": [*options, own, ref("open")]}


def _by_name(key: str, known: list[str], prefix: str, custom: str, choice: str) -> Schema:
    """Return the schema of a mapping whose other keys depend on one: an if/then for each of its values."""
    cases = [{"if": _where(key, {"const": name}), "then": ref(f"{prefix}{name}")} for name in known]
    cases.append({"if": _where(key, {"type": "string", "pattern": FUNCTION}), "then": ref(custom)})
    about = {"properties": {key: ref(choice)}, "required": [key], "allOf": cases}
    return {"type": ["object", "string"], "pattern": OPEN, **about}


def _where(key: str, value: Schema) -> Schema:
    return {"type": "object", "properties": {key: value}, "required": [key]}


def _document(entry: OpEntry) -> Schema:
    doc = entry.doc
    parts = [doc.summary, doc.body, f"```yaml\n{doc.example}\n```" if doc.example else ""]
    return {"description": doc.summary, "markdownDescription": "\n\n".join(part for part in parts if part)}
