"""Schema components: of values that also let ``???`` and ``${...}`` through, and of edits."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlgraph.reference.words import default_of, in_words

Schema = dict[str, Any]

PARTS: Schema = yaml.safe_load((Path(__file__).parent / "schema.yaml").read_text(encoding="utf-8"))
OPEN: str = PARTS["open"]
EDITS: dict[str, str] = PARTS["edits"]
NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
FIXED = ("type", "enum", "const", "pattern")
ITEMS = ("items", "additionalProperties")
NODE_PATH = r"^(nodes\.)?(?!(%s)$)[A-Za-z_][A-Za-z0-9_]*$"


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
    options = schema.get("anyOf", [])
    if any(_is_number(option) for option in options):
        schedules = [ref("course"), ref("adaptive")] if adapts else [ref("course")]
        return {**schema, "anyOf": [*options, *schedules]}
    if options:
        return {**schema, "anyOf": [changing(option) for option in options]}
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        return {**schema, "additionalProperties": changing(values)}
    if not _is_number(schema):
        return schema
    schedule: Schema = ref("course")
    if adapts:
        schedule = {"if": {"required": ["adaptive"]}, "then": ref("adaptive"), "else": ref("course")}
    return {**schema, "type": [*_types(schema), "object"], "if": {"type": "object"}, "then": schedule}


def _is_number(schema: Schema) -> bool:
    return bool({"number", "integer"} & {*_types(schema)})


def _types(schema: Schema) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def described(text: str, kind: str, default: str) -> Schema:
    """Return a description, and the same as Markdown with the type and the default."""
    text = " ".join(text.replace("``", "`").split())
    ending = default if default == "required" else f"default `{default}`"
    return {"description": text, "markdownDescription": f"{text}\n\n*{kind}; {ending}*"}


def section_schema(section: Schema) -> Schema:
    """Return a section's schema as pydantic makes it, with its text as Markdown and every value open."""
    required = section.get("required", ())
    properties = {}
    for name, schema in section["properties"].items():
        text, default = schema.get("description", ""), default_of(schema, name in required)
        properties[name] = {**opened(schema), **described(text, in_words(schema), default)}
    text = section.get("description", "").replace("``", "`")
    return opened({**section, "description": text, "properties": properties})


def by_name(values: Schema, schema: Schema) -> Schema:
    """Return the schema of a mapping of names to values."""
    return {**schema, "propertyNames": {"pattern": NAME}, "additionalProperties": values}


def marked_down(schema: Any) -> Any:
    """Copy each ``description`` to ``markdownDescription``, which editors render."""
    if isinstance(schema, list):
        return [marked_down(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copied = {key: marked_down(value) for key, value in schema.items()}
    text = schema.get("description")
    if isinstance(text, str):
        return {"markdownDescription": text} | copied
    return copied


def ref(name: str) -> Schema:
    """Return a reference to a definition."""
    return {"$ref": f"#/$defs/{name}"}


def _inside(schema: Schema) -> Schema:
    """Return the schema without the parts that no editor uses, and with its values opened."""
    inner = {key: value for key, value in schema.items() if key not in ("title", "format")}
    for key in ITEMS:
        if isinstance(inner.get(key), dict):
            inner[key] = opened(inner[key])
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
    return {
        "type": "object",
        "properties": edits,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }


def _paths(
    location: str, properties: Mapping[str, Schema], definitions: Mapping[str, Schema], prefix: str
) -> Iterator[tuple[str, Schema]]:
    """Yield a pattern for each path into the sections, and a reference to the schema of its value.

    Args:
        location: where ``properties`` are in the schema.
        properties: the sections.
        definitions: records that sections refer to.
        prefix: the pattern of the path to the sections.
    """
    for name, schema in properties.items():
        if name in ("nodes", "extends", "use", "edits"):
            continue
        path, place = f"{prefix}{name}", f"{location}/{name}"
        yield f"^{path}$", {"$ref": place}
        values = schema.get("additionalProperties")
        if isinstance(values, dict):
            schema = values
            path, place = f"{path}\\.[^.]+", f"{place}/additionalProperties"
            yield f"^{path}$", {"$ref": place}
        for option in (schema, *schema.get("anyOf", ())):
            target = str(option.get("$ref", "")).removeprefix("#/$defs/")
            if target in definitions:
                fields = definitions[target]["properties"]
                yield from _paths(f"#/$defs/{target}/properties", fields, definitions, f"{path}\\.")
