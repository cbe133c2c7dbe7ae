"""The schema of edits: a word, and values by path into the sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlgraph.reference.schema_parts import (
    Schema,
    ref,
)

NODE_PATH = r"^(nodes\.)?(?!(%s)$)[A-Za-z_][A-Za-z0-9_]*$"


EDITS = {
    "add": "What is new: nodes by name, or `models.NAME` and other sections. It must not be there yet.",
    "remove": "Names of nodes, or paths such as `models.critic` and `rollout.top_k`. They must be there.",
    "replace": "Nodes by name, or paths: what is there is taken out, and this put in its place.",
    "set": "Values by path, as `rollout.n: 8` or `models.policy.optimizer.lr: 1e-5`.",
    "insert": "Nodes by name, each `on` a column: whoever read that now reads what the node writes.",
    "rename": "Old name: new name, of a node, `models.NAME` or a column; whoever named it follows.",
}


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
    at: str, properties: Mapping[str, Schema], definitions: Mapping[str, Schema], above: str
) -> Iterator[tuple[str, Schema]]:
    """Yield a pattern for each path into the sections, and a reference to the schema of its value."""
    for name, schema in properties.items():
        path, place = f"{above}{name}", f"{at}/{name}"
        if name in ("nodes", "extends", "edits"):
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
