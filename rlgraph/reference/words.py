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
        return alternatives([in_words(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return alternatives([str(value) for value in schema["enum"]])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of{_count(schema)}: {in_words(schema.get('items', {}))}"
    default = "mapping" if "$ref" in schema else "anything"
    name = PLAIN.get(schema.get("type", ""), default)
    if schema.get("format") in FORMATS:
        name = FORMATS[schema["format"]]
    return ", ".join([name, *bounds(schema)])


def _count(schema: Mapping[str, Any]) -> str:
    """Return how many items a list has, as `` 2 or more``; empty if that is free."""
    low, high = schema.get("minItems"), schema.get("maxItems")
    if not low:
        return ""
    return f" {low}" if low == high else f" {low} or more"


def bounds(schema: Mapping[str, Any]) -> list[str]:
    """Return the bounds of a number, as ``at least 1``."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return [f"only {low:g}"] if low == high else [f"{low:g} to {high:g}"]
    words = []
    if low is not None:
        words.append(f"at least {low:g}")
    if "exclusiveMinimum" in schema:
        words.append(f"above {schema['exclusiveMinimum']:g}")
    if high is not None:
        words.append(f"at most {high:g}")
    if "exclusiveMaximum" in schema:
        words.append(f"below {schema['exclusiveMaximum']:g}")
    return words


def default_of(schema: Mapping[str, Any], required: bool) -> str:
    """Return a default as it is written in a graph; ``required`` if there is none."""
    if required:
        return "required"
    value = schema.get("default")
    if isinstance(value, dict) or "$ref" in schema:
        return "{}"
    if isinstance(value, str) and value:
        return value
    return json.dumps(value)


def alternatives(options: list[str]) -> str:
    """Return ``a, b or c``; with a comma before the "or" where an option has commas itself."""
    if len(options) == 1:
        return options[0]
    has_commas = any("," in option for option in options)
    conjunction = ", or" if has_commas else " or"
    return f"{', '.join(options[:-1])}{conjunction} {options[-1]}"
