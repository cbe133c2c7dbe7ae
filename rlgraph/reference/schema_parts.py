"""Schema components: JSON schemas of values that also let ``???`` and ``${...}`` through."""

from __future__ import annotations

from typing import Any

from rlgraph.reference.words import default_of, in_words

Schema = dict[str, Any]

NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
OPEN = r"^\?\?\?$|\$\{"  # a value that only the user can give, and one that is taken from elsewhere
ITERATIONS = {"type": ["integer", "string"], "minimum": 1, "pattern": OPEN}
ENDS = {
    "type": "array",
    "items": {"type": ["number", "string"], "pattern": OPEN},
    "minItems": 2,
    "maxItems": 2,
}
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
ABOVE = {"type": ["number", "string"], "exclusiveMinimum": 0, "pattern": OPEN}
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


def opened(schema: Schema) -> Schema:
    """Return a value's schema that lets both through, down to the items of lists and mappings.

    Example:
        >>> opened({"type": "integer"})["type"], "type" in opened({"type": "integer", "enum": [1, 2]})
        (['integer', 'string'], False)
    """
    made = _inside(schema)
    if "anyOf" in made:
        return {**made, "anyOf": [*map(_inside, made["anyOf"]), ref("open")]}
    if {"enum", "const", "pattern"} & {*made}:
        kept = {key: made.pop(key) for key in FIXED if key in made}
        return {**made, "anyOf": [kept, ref("open")]}
    if made.get("type") in ("string", None):
        return made
    # one schema, not a choice of two: an editor then says what is wrong with a value
    accepted = f"{in_words(schema)}; or ???, or ${{...}}"
    return {**made, "type": [made["type"], "string"], "pattern": OPEN, "patternErrorMessage": accepted}


def changing(schema: Schema, adapts: bool = False) -> Schema:
    """Return a value's schema that takes a schedule where it is a number, and a controller if it ``adapts``.

    Example:
        >>> changing(opened({"type": "number"}))["type"], changing(opened({"type": "boolean"}))["type"]
        (['number', 'string', 'object'], ['boolean', 'string'])
    """
    if any({"number", "integer"} & {*_types(option)} for option in schema.get("anyOf", ())):
        return {**schema, "anyOf": [*schema["anyOf"], ref("course"), *([ref("adaptive")] if adapts else [])]}
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
    text = text.replace("``", "`")
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
    made = {key: value for key, value in schema.items() if key not in ("title", "format")}
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = opened(made[key])
    if isinstance(made.get("default"), dict):
        del made["default"]
    return made
