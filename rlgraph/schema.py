"""The graph language as one JSON Schema (draft 2020-12), for completion, hover and checks in editors.

It is made from the declarations that ``rlgraph check`` uses: the records in ``rlgraph/sections.py``, and the
ops' and losses' signatures and docstrings. It knows one value at a time; edges, domains, versions and the
names of models are left to ``rlgraph check``.

    nodes.NAME ── op: rollout ──> #/$defs/op.rollout        if/then, one for each op
                  op: my_ops.py:f ──> #/$defs/custom        open: its file is not read
        loss ──── kind: sft ────> #/$defs/loss.sft
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlgraph.course import STRUCTURE
from rlgraph.describe import Entry, attribute_schemas, entry_of, find
from rlgraph.nodes import HOOKS, OPS
from rlgraph.op import Op, Port
from rlgraph.opened import ADAPTIVE, COURSE, OPEN, Schema, changing, marked_down, opened, ref, said
from rlgraph.sections import GraphFile, Refill
from rlgraph.words import default_of, in_words

NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
FUNCTION = r"\.py:\w+$"
MODEL = r"^[A-Za-z_][A-Za-z0-9_]*(@next)?$"
LATER = " NAME@next is the version after its update."
NODE_PATH = r"^(nodes\.)?(?!(%s)$)[A-Za-z_][A-Za-z0-9_]*$"
ROWS = {"type": "string", "description": "The filter, by its node's name, whose rows alone are read."}
OF = {
    "type": "string",
    "pattern": f"{MODEL}|{OPEN}",
    "description": f"The model whose weights are copied.{LATER}",
}
REFILL = {
    **ref("refill"),
    "description": "Of a filter: repeat what is before it with the next prompts until enough rows stay.",
}
CADENCE = {
    "every": "Iterations from one in which it runs to the next; without `from` those that it divides.",
    "from": "The first iteration in which it runs, counted from 1; by default `every`.",
}
POOL = {"type": "string", "description": "The pool that it runs on; by default where most that it reads is."}

EDITS = {
    "add": "What is new: nodes by name, or `models.NAME` and other sections. It must not be there yet.",
    "remove": "Names of nodes, or paths such as `models.critic` and `rollout.top_k`. They must be there.",
    "replace": "Nodes by name, or paths: what is there is taken out, and this put in its place.",
    "set": "Values by path, as `rollout.n: 8` or `models.policy.optimizer.lr: 1e-5`.",
    "insert": "Nodes by name, each `on` a column: whoever read that now reads what the node writes.",
    "rename": "Old name: new name, of a node, `models.NAME` or a column; whoever named it follows.",
}


def graph_schema() -> Schema:
    """The schema of a graph file; ``???`` and ``${...}`` stand for any value."""
    root = GraphFile.model_json_schema()
    definitions = {name: _told(part) for name, part in root.pop("$defs").items()}
    definitions["Eval"]["properties"]["nodes"] = _map(
        ref("changed"), definitions["Eval"]["properties"]["nodes"]
    )
    properties = _told(root)["properties"]
    for name in ("models", "nodes", "pools"):
        inner = ref("node") if name == "nodes" else properties[name]["additionalProperties"]
        properties[name] = _map(inner, properties[name])
    properties["edits"]["items"] = ref("edit")
    for name in {*properties} - {"seed"}:
        properties[name].pop("default", None)
        del properties[name]["markdownDescription"]  # it tells of that default
    rate = definitions["Optimizer"]["properties"]
    rate["lr"] = changing(rate["lr"])
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A graph of rlgraph",
        "description": root["description"].replace("``", "`"),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "dependentRequired": {"edits": ["extends"]},
        "if": {"required": ["extends"]},
        "then": {"propertyNames": {"enum": ["graph", "about", "extends", "edits"]}},
        "else": {"required": ["graph", "nodes", "schedule"]},
        "$defs": definitions | _node_definitions() | {"edit": _edit(properties, definitions)},
    }
    return {**marked_down(schema)}


def _node_definitions() -> dict[str, Schema]:
    definitions = {
        "open": {"type": "string", "pattern": OPEN, "description": "`???`: to be given; or `${...}`."},
        "course": COURSE,
        "adaptive": ADAPTIVE,
        "op": _choice({name: f"op.{name}" for name in OPS}, "Which op the node runs", "an op"),
        "node": _by_name("op", [*OPS], "op.", "custom", "op"),
        "changed": _changed(),
        "custom": _custom(),
        "refill": _refill(),
    }
    for word, known in HOOKS.items():
        definitions[f"{word}_kind"] = _choice(known, f"Which {word}", f"a {word}")
        definitions[word] = _by_name("kind", [*known], f"{word}.", f"custom_{word}", f"{word}_kind")
        definitions[f"custom_{word}"] = {"type": "object", "properties": {"kind": {}}}
        definitions |= {f"{word}.{name}": _hook(find(name), entry_of(name)) for name in known}
    definitions |= {f"op.{name}": _op(find(name), entry_of(name)) for name in OPS}
    spliced = [name for name in OPS if find(name).inputs and len(find(name).outputs) == 1]
    definitions["inserted"] = _by_name("op", spliced, "inserted.", "custom", "op")
    return definitions | {f"inserted.{name}": _inserted(name, definitions[f"op.{name}"]) for name in spliced}


def _op(op: Op, entry: Entry) -> Schema:
    """A node of one op: every key that may stand in it."""
    properties = {"op": {}, **_model_keys(op), **_attributes(op, entry), **_edges(op)}
    attributes = op.attributes.model_fields
    required = [name for name, field in attributes.items() if field.is_required()]
    required += ["model"] if op.engine or op.declared.recorded else []
    return {**_document(entry), "properties": properties, "required": required, "additionalProperties": False}


def _inserted(name: str, node: Schema) -> Schema:
    """A node under ``insert``: one with the column that it is put on."""
    properties = {key: ref(f"op.{name}/properties/{key}") for key in node["properties"]}
    on = {"type": "string", "description": "The column that it is put on: whoever read it reads this node's."}
    return {**node, "properties": {**properties, "on": on}, "required": [*node["required"], "on"]}


def _hook(op: Op, entry: Entry) -> Schema:
    required = [name for name, field in op.attributes.model_fields.items() if field.is_required()]
    properties = {"kind": {}, **_attributes(op, entry)}
    return {**_document(entry), "properties": properties, "required": required, "additionalProperties": False}


def _attributes(op: Op, entry: Entry) -> dict[str, Schema]:
    schemas = attribute_schemas(op)
    made = {}
    for name, kind, default, text in entry.attributes:
        adapts = not op.kind and name in op.declared.measures
        schema = _hooks(op, name) if name in op.hooks else changing(opened(schemas[name]), adapts)
        if name in (*STRUCTURE, op.declared.times):
            schema = opened(schemas[name])
        made[name] = {**schema, **said(text, kind, default)}
    return made


def _hooks(op: Op, name: str) -> Schema:
    """A hook, or several by name; null where there may be none."""
    one = ref(op.hooks[name].word)
    made = {"type": "object", "additionalProperties": one} if name in op.several else one
    if op.attributes.model_fields[name].is_required():
        return made
    return {"anyOf": [made, {"type": "null"}, ref("open")], "default": None}


def _model_keys(op: Op) -> dict[str, Schema]:
    keys = {}
    if op.engine:
        head = "" if op.copies else f"; it needs head {op.declared.head}"
        text = f"The model, by its name in `models`{head}."
        text += LATER * (not op.declared.updates)
        keys["model"] = {"type": "string", "pattern": f"{MODEL}|{OPEN}", "description": text}
    keys |= {"of": OF} if op.copies else {}
    if op.declared.recorded:
        text = "The model that sampled the rows, by its name in `models`."
        keys["model"] = {"type": "string", "pattern": f"{MODEL}|{OPEN}", "description": text}
    if "tokenizer" in op.handles.values():
        text = "The model whose tokenizer is used; by default that of the one trained language model."
        keys["tokenizer"] = {"type": "string", "description": text}
    return keys


def _edges(op: Op) -> dict[str, Schema]:
    """``in`` and ``out``, with the op's names of its columns."""
    made = {}
    ports = {port.name: port for port in op.inputs}
    for kind in op.hooks.values():
        shipped = [find(name) for name in HOOKS[kind.word]] if kind.reads else []
        ports |= {p.name: p for hook in shipped for p in hook.inputs if p.name not in kind.provides}
    if ports:
        made["in"] = _columns(ports, "Which column each parameter reads, where names differ.", bool(op.hooks))
    if op.outputs:
        outs = {port.name: port for port in op.outputs if port.name}
        made["out"] = _columns(outs, "Other names for the columns that it writes.", not outs)
    if not op.source:
        made["rows"] = ROWS
    if op.declared.filters:
        made["refill"] = REFILL
    made |= {} if op.outputs else _cadence()
    return made if op.engine else {**made, "pool": POOL}


def _cadence() -> dict[str, Schema]:
    """``every`` and ``from``, of a node that writes no column."""
    number = opened({"type": "integer", "minimum": 1})
    return {key: {**number, "description": text} for key, text in CADENCE.items()}


def _columns(ports: Mapping[str, Port], text: str, more: bool) -> Schema:
    column = {"type": "string", "pattern": f"{NAME}|{OPEN}"}
    properties = {
        name: {**column, "description": f"A column of {port.type}."} for name, port in ports.items()
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": column if more else False}
    return {**opened(schema), "description": text}


def _custom() -> Schema:
    """A node that runs a function in a user's file: what may stand in it beside its attributes."""
    column = {"type": "string", "pattern": f"{NAME}|{OPEN}"}
    columns = {"type": "object", "additionalProperties": column}
    return {
        "description": "A node that runs a function in a file beside the graph.",
        "properties": {
            "op": {},
            "model": {
                "type": "string",
                "pattern": f"{MODEL}|{OPEN}",
                "description": "The model that it reads.",
            },
            "tokenizer": {"type": "string", "description": "The model whose tokenizer is used."},
            "in": {**columns, "description": "Which column each parameter reads, where names differ."},
            "out": {**columns, "description": "Other names for the columns that it writes."},
            "rows": ROWS,
            "refill": REFILL,
            "pool": POOL,
            **_cadence(),
            "of": OF,
        },
    }


def _refill() -> Schema:
    """Of a filter: true for all defaults, or a mapping."""
    section = _told(Refill.model_json_schema())
    return {**section, "type": ["object", "boolean", "string"], "pattern": OPEN}


def _changed() -> Schema:
    """A node under ``eval``: a new one, or other attributes of the graph's."""
    return {
        "type": ["object", "string"],
        "pattern": OPEN,
        "properties": {"op": ref("op")},
        "if": {"type": "object", "required": ["op"]},
        "then": ref("node"),
    }


def _choice(known: Mapping[str, str], what: str, one: str) -> Schema:
    """A shipped name, each with its documentation, or a function in a file."""
    options = [{"const": name, **_document(entry_of(name))} for name in known]
    own = {"type": "string", "pattern": FUNCTION, "description": f"{one} in a file: `my_ops.py:name`."}
    return {"description": f"{what}; `rlgraph nodes` lists them.", "anyOf": [*options, own, ref("open")]}


def _by_name(key: str, known: list[str], prefix: str, custom: str, choice: str) -> Schema:
    """A mapping whose other keys depend on one: an if/then for each of its values."""
    cases = [{"if": _where(key, {"const": name}), "then": ref(f"{prefix}{name}")} for name in known] + [
        {"if": _where(key, {"type": "string", "pattern": FUNCTION}), "then": ref(custom)}
    ]
    return {
        "type": ["object", "string"],
        "pattern": OPEN,
        "properties": {key: ref(choice)},
        "required": [key],
        "allOf": cases,
    }


def _where(key: str, value: Schema) -> Schema:
    return {"type": "object", "properties": {key: value}, "required": [key]}


def _edit(properties: Mapping[str, Schema], definitions: Mapping[str, Schema]) -> Schema:
    """One edit: a word, and values by path."""
    paths = dict(_paths("#/properties", properties, definitions, ""))
    paths["^eval\\.nodes\\.[^.]+$"] = ref("changed")
    paths[NODE_PATH % "|".join(properties)] = ref("node")
    by_path = {"type": "object", "patternProperties": paths}
    names = {"type": "array", "items": {"type": "string"}}
    kinds: dict[str, Schema] = {
        "remove": {"anyOf": [{"type": "string"}, names]},
        "rename": {"type": "object", "additionalProperties": {"type": "string"}},
        "insert": {"type": "object", "additionalProperties": ref("inserted")},
    }
    edits = {word: {"description": text, **kinds.get(word, by_path)} for word, text in EDITS.items()}
    return {
        "type": "object",
        "properties": edits,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }


def _paths(
    at: str, properties: Mapping[str, Schema], definitions: Mapping[str, Schema], above: str
) -> Iterator[tuple[str, Schema]]:
    """A pattern for each path into the sections -> a reference to the schema of its value."""
    for name, schema in properties.items():
        path, place = f"{above}{name}", f"{at}/{name}"
        if name in ("nodes", "extends", "edits"):
            continue
        yield f"^{path}$", {"$ref": place}
        if isinstance(schema.get("additionalProperties"), dict):
            path, place, schema = (
                f"{path}\\.[^.]+",
                f"{place}/additionalProperties",
                schema["additionalProperties"],
            )
            yield f"^{path}$", {"$ref": place}
        for inner in (schema, *schema.get("anyOf", ())):
            target = str(inner.get("$ref", "")).removeprefix("#/$defs/")
            if target in definitions:
                below = definitions[target]["properties"]
                yield from _paths(f"#/$defs/{target}/properties", below, definitions, f"{path}\\.")


def _told(section: Schema) -> Schema:
    """A section's schema as pydantic makes it, with its text as Markdown and every value open."""
    required = section.get("required", ())
    properties = {}
    for name, schema in section["properties"].items():
        text = schema.get("description", "")
        about = said(text, in_words(schema), default_of(schema, name in required))
        properties[name] = {**opened(schema), **about}
    text = section.get("description", "").replace("``", "`")
    return opened({**section, "description": text, "properties": properties})


def _document(entry: Entry) -> Schema:
    doc = entry.doc
    parts = [doc.summary, doc.body, f"```yaml\n{doc.example}\n```" if doc.example else ""]
    return {"description": doc.summary, "markdownDescription": "\n\n".join(part for part in parts if part)}


def _map(values: Schema, schema: Schema) -> Schema:
    """A mapping of names to values."""
    return {**schema, "propertyNames": {"pattern": NAME}, "additionalProperties": values}
