"""Writes the type of an attribute in plain words, from its JSON schema."""

import json
from collections.abc import Mapping
from typing import Any

PLAIN = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "mapping",
}

FORMATS = {"path": "path", "interval": "duration as `30 min`, or epochs as `0.5 epochs`"}


def in_words(schema: Mapping[str, Any]) -> str:
    """Return the values that a schema accepts, in words.

    Example:
        >>> in_words({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})
        'whole number, at least 1, or null'
        >>> in_words({"type": "number", "minimum": 0, "maximum": 1})
        'number, 0 to 1'
    """
    if "anyOf" in schema:
        return listed([in_words(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return listed([str(value) for value in schema["enum"]])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        low, high = schema.get("minItems"), schema.get("maxItems")
        count = f" {low}" if low == high and low else f" {low} or more" if low else ""
        return f"list of{count}: {in_words(schema.get('items', {}))}"
    plain = PLAIN.get(schema.get("type", ""), "mapping" if "$ref" in schema else "anything")
    return ", ".join([FORMATS.get(schema.get("format", ""), plain), *bounds(schema)])


def bounds(schema: Mapping[str, Any]) -> list[str]:
    """Return the bounds of a number, as ``at least 1``."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and low == high:
        return [f"only {low:g}"]
    if low is not None and high is not None:
        return [f"{low:g} to {high:g}"]
    said = [f"at least {low:g}"] if low is not None else []
    said += [f"above {schema['exclusiveMinimum']:g}"] if "exclusiveMinimum" in schema else []
    said += [f"at most {high:g}"] if high is not None else []
    return said + ([f"below {schema['exclusiveMaximum']:g}"] if "exclusiveMaximum" in schema else [])


def default_of(schema: Mapping[str, Any], required: bool) -> str:
    """Return a default as it is written in a graph; ``required`` where there is none."""
    if required:
        return "required"
    value = schema.get("default")
    if isinstance(value, dict) or "$ref" in schema:
        return "{}"
    return value if isinstance(value, str) and value else json.dumps(value)


def listed(options: list[str]) -> str:
    """Return ``a, b or c``."""
    *most, last = options
    comma = "," if any("," in option for option in options) else ""
    return f"{', '.join(most)}{comma} or {last}" if most else last
