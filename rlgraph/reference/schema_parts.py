"""Schema components: of values that also let ``???`` and ``${...}`` through, and of edits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlgraph.reference.words import default_of, in_words

Schema = dict[str, Any]

NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
OPEN = r"^\?\?\?$|\$\{"  # a value that only the user can give, and one that is taken from elsewhere
ITERATIONS = {"type": ["integer", "string"], "minimum": 1, "pattern": OPEN}
NUMBER = {"type": ["number", "string"], "pattern": OPEN}
ENDS = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
COURSE: Schema = {
    "type": "object",
    "description": "A number that changes over the iterations, which count from 1.",
    "properties": {
        "linear": {**ENDS, "description": "From the first number to the second, evenly."},
        "cosine": {**ENDS, "description": "From the first number to the second, along half a cosine wave."},
        "steps": {"type": "object", "description": "The iteration from which on: the number."},
        "over": {**ITERATIONS, "description": "In how many iterations it gets there."},
        "from": {**ITERATIONS, "description": "The iteration in which it begins to; 1 unless given."},
    },
    "additionalProperties": False,
    "oneOf": [{"required": [name]} for name in ("linear", "cosine", "steps")],
}
ABOVE = {"type": NUMBER["type"], "exclusiveMinimum": 0, "pattern": OPEN}
ADAPTIVE: Schema = {
    "type": "object",
    "description": "A number that follows the KL that its node measures (arXiv 1909.08593, section 2.2).",
    "properties": {
        "adaptive": {**ABOVE, "description": "What it begins with."},
        "target": {**ABOVE, "description": "The KL that is aimed at, in the units of the metric."},
        "horizon": {**ABOVE, "description": "In how many samples it changes by a fifth at most."},
    },
    "additionalProperties": False,
    "required": ["adaptive", "target", "horizon"],
}
FIXED = ("type", "enum", "const", "pattern")
ITEMS = ("items", "additionalProperties")
NODE_PATH = r"^(nodes\.)?(?!(%s)$)[A-Za-z_][A-Za-z0-9_]*$"
EDITS = {
    "add": "What is new: nodes by name, or `models.NAME` and other sections. It must not be there yet.",
    "remove": "Names of nodes, or paths such as `models.critic` and `rollout.top_k`. They must be there.",
    "replace": "Nodes by name, or paths: what is there is taken out, and this put in its place.",
    "set": "Values by path, as `rollout.n: 8` or `models.policy.optimizer.lr: 1e-5`.",
    "insert": "Nodes by name, each `on` a column: whoever read that now reads what the node writes.",
    "rename": "Old name: new name, of a node, `models.NAME` or a column; whoever named it follows.",
}


def opened(schema: Schema) -> Schema:
    """Return a value's schema that lets both through, down to the items of lists and mappings.

    Example:
        >>> opened({"type": "integer"})["type"], "type" in opened({"type": "integer", "enum": [1, 2]})
        (['integer', 'string'], False)
    """
    inner = _inside(schema)
    if "anyOf" in inner:
        return {**inner, "anyOf": [*map(_inside, inner["anyOf"]), ref("open")]}
    if {"enum", "const", "pattern"} & {*inner}:
        kept = {key: inner.pop(key) for key in FIXED if key in inner}
        return {**inner, "anyOf": [kept, ref("open")]}
    if inner.get("type") in ("string", None):
        return inner
    # one schema, not a choice of two: an editor then says what is wrong with a value
    accepted = f"{in_words(schema)}; or ???, or ${{...}}"
    return {**inner, "type": [inner["type"], "string"], "pattern": OPEN, "patternErrorMessage": accepted}


def changing(schema: Schema, adapts: bool = False) -> Schema:
    """Return a value's schema that takes a schedule where it is a number, and a controller if it ``adapts``.

    Example:
        >>> changing(opened({"type": "number"}))["type"], changing(opened({"type": "boolean"}))["type"]
        (['number', 'string', 'object'], ['boolean', 'string'])
    """
    if any({"number", "integer"} & {*_types(option)} for option in schema.get("anyOf", ())):
        return {**schema, "anyOf": [*schema["anyOf"], ref("course"), *([ref("adaptive")] if adapts else [])]}
    if options := schema.get("anyOf"):
        return {**schema, "anyOf": [*map(changing, options)]}
    if isinstance(named := schema.get("additionalProperties"), dict):
        return {**schema, "additionalProperties": changing(named)}
    if not {"number", "integer"} & {*_types(schema)}:
        return schema
    known: Schema = {"if": {"required": ["adaptive"]}, "then": ref("adaptive"), "else": ref("course")}
    course = {"if": {"type": "object"}, "then": known if adapts else ref("course")}
    return {**schema, "type": [*_types(schema), "object"], **course}


def _types(schema: Schema) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def said(text: str, kind: str, default: str) -> Schema:
    """Return a description, and as Markdown with the type and the default."""
    text = " ".join(text.replace("``", "`").split())
    ending = default if default == "required" else f"default `{default}`"
    return {"description": text, "markdownDescription": f"{text}\n\n*{kind}; {ending}*"}


def told(section: Schema) -> Schema:
    """Return a section's schema as pydantic makes it, with its text as Markdown and every value open."""
    required = section.get("required", ())
    properties = {}
    for name, schema in section["properties"].items():
        text = schema.get("description", "")
        about = said(text, in_words(schema), default_of(schema, name in required))
        properties[name] = {**opened(schema), **about}
    text = section.get("description", "").replace("``", "`")
    return opened({**section, "description": text, "properties": properties})


def named(values: Schema, schema: Schema) -> Schema:
    """Return the schema of a mapping of names to values."""
    return {**schema, "propertyNames": {"pattern": NAME}, "additionalProperties": values}


def marked_down(schema: Any) -> Any:
    """Copy each ``description`` to ``markdownDescription``, which editors render."""
    if isinstance(schema, list):
        return [marked_down(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    text = schema.get("description")
    about = {"markdownDescription": text} if isinstance(text, str) else {}
    return about | {key: marked_down(value) for key, value in schema.items()}


def ref(name: str) -> Schema:
    """Return a reference to a definition."""
    return {"$ref": f"#/$defs/{name}"}


def _inside(schema: Schema) -> Schema:
    """Return the schema without the parts that no editor uses, and with its values opened."""
    inner = {key: value for key, value in schema.items() if key not in ("title", "format")}
    inner |= {key: opened(inner[key]) for key in ITEMS if isinstance(inner.get(key), dict)}
    if isinstance(inner.get("default"), dict):
        del inner["default"]
    return inner


def edit_schema(properties: Mapping[str, Schema], definitions: Mapping[str, Schema]) -> Schema:
    """Return the schema of one edit: a word, and values by path."""
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
    one = {"additionalProperties": False, "minProperties": 1, "maxProperties": 1}
    return {"type": "object", "properties": edits, **one}


def _paths(
    at: str, properties: Mapping[str, Schema], definitions: Mapping[str, Schema], above: str
) -> Iterator[tuple[str, Schema]]:
    """Yield a pattern for each path into the sections, and a reference to the schema of its value."""
    for name, schema in properties.items():
        path, place = f"{above}{name}", f"{at}/{name}"
        if name in ("nodes", "extends", "use", "edits"):
            continue
        yield f"^{path}$", {"$ref": place}
        if isinstance(schema.get("additionalProperties"), dict):
            schema = schema["additionalProperties"]
            path, place = f"{path}\\.[^.]+", f"{place}/additionalProperties"
            yield f"^{path}$", {"$ref": place}
        for inner in (schema, *schema.get("anyOf", ())):
            target = str(inner.get("$ref", "")).removeprefix("#/$defs/")
            if target in definitions:
                below = definitions[target]["properties"]
                yield from _paths(f"#/$defs/{target}/properties", below, definitions, f"{path}\\.")
