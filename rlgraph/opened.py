"""JSON schemas of values that also let ``???`` and ``${...}`` through."""

from __future__ import annotations

from typing import Any

from rlgraph.words import in_words

Schema = dict[str, Any]

OPEN = r"^\?\?\?$|\$\{"  # a value that only the user can give, and one that is taken from elsewhere
FIXED = ("type", "enum", "const", "pattern")


def opened(schema: Schema) -> Schema:
    """A value's schema that lets both through, down to the items of lists and mappings.

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


def said(text: str, kind: str, default: str) -> Schema:
    """A description, and as Markdown with the type and the default."""
    text = text.replace("``", "`")
    ending = default if default == "required" else f"default `{default}`"
    return {"description": text, "markdownDescription": f"{text}\n\n*{kind}; {ending}*"}


def marked_down(schema: Any) -> Any:
    """The schema with every description as Markdown too: an editor escapes what is not said to be."""
    if isinstance(schema, list):
        return [marked_down(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    text = schema.get("description")
    about = {"markdownDescription": text} if isinstance(text, str) else {}
    return about | {key: marked_down(value) for key, value in schema.items()}


def ref(name: str) -> Schema:
    """A reference to a definition."""
    return {"$ref": f"#/$defs/{name}"}


def _inside(schema: Schema) -> Schema:
    """The schema without what an editor has no use for, what it holds opened."""
    made = {key: value for key, value in schema.items() if key not in ("title", "format")}
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = opened(made[key])
    if isinstance(made.get("default"), dict):
        del made["default"]
    return made
