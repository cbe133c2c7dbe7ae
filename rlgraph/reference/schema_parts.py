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
