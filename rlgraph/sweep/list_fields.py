"""Finds how deep a list may stand at a path of a graph, by the types that sections and ops declare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from rlgraph.errors import GraphError
from rlgraph.frontend.ports import hooked
from rlgraph.frontend.tree_paths import resolve
from rlgraph.ops.registry import find_hook, find_op
from rlgraph.reference.schema_parts import PARTS, Schema
from rlgraph.syntax.settings import GraphFile
from rlgraph.syntax.source import Tree


def list_depth(tree: Tree, name: str) -> float:
    """Return how many lists may stand in each other at a path: 0 where one value is taken, 1 for a list.

    Args:
        tree: the composed graph, whose ops say what attributes its nodes have.
        name: the path as it is typed, as ``rollout.n``.

    Returns:
        The depth; infinity where any value is taken, and 0 where nothing declares the path.

    Raises:
        GraphError: the first word of the path is neither a section nor a node.
    """
    path = (name,) if name in GraphFile.model_fields else resolve(tree, name, None)
    if path[:2] == ("eval", "nodes"):
        path = path[1:]
    if path[0] == "nodes" and len(path) > 2:
        return _depth_in_node(tree, path[1], path[2:])
    return _deepest(_types_at(GraphFile, path))


def _depth_in_node(tree: Tree, name: str, path: tuple[str, ...]) -> float:
    """Return the depth at a path in a node: of a key that all nodes have, or of an attribute."""
    if path[0] in PARTS["keys"]:
        return _schema_depth(PARTS["keys"][path[0]], path[1:])
    node = tree.find(("nodes", name)) or tree.find(("eval", "nodes", name))
    attributes, path = _declared(node, path) if node else (None, path)
    if attributes is None:
        return 0
    depth = _deepest(_types_at(attributes, path))
    if len(path) > 1:  # the ends of a number that changes over the iterations
        depth = max(depth, _schema_depth(PARTS["definitions"]["course"], path[-1:]))
    return depth


def _declared(node: Tree, path: tuple[str, ...]) -> tuple[type[BaseModel] | None, tuple[str, ...]]:
    """Return the attributes of a node's op, or of the hook that a path leads into, and the path in them."""
    op_name = node.get("op")
    if op_name is None:
        return None, path
    try:
        op, _ = find_op(str(op_name.value), op_name.mark)
        for hook_path, hook, item in hooked(op, node):
            prefix = tuple(hook_path.split("."))
            path_in_hook = path[len(prefix) :]
            leads_into_hook = path[: len(prefix)] == prefix and path_in_hook
            kind = item.get("kind")
            if kind and leads_into_hook:
                loaded, _ = find_hook(hook, str(kind.value), kind.mark)
                return loaded.attributes, path_in_hook
    except GraphError:  # it is reported where the graph is compiled
        return None, path
    return op.attributes, path


def _schema_depth(schema: Schema, path: tuple[str, ...]) -> float:
    """Return the depth at a path in a JSON schema."""
    for name in path:
        schema = schema.get("properties", {}).get(name)
        if not schema:
            return 0
    options = [schema, *schema.get("anyOf", ())]
    takes_list = any("array" in option.get("type", ()) for option in options)
    return 1 if takes_list else 0


def _types_at(annotation: Any, path: tuple[str, ...]) -> Iterator[Any]:
    """Yield the types that may stand at a path inside a type: in records by field, in mappings by value."""
    if not path:
        yield annotation
        return
    for option in _options(annotation):
        if get_origin(option) is dict:
            _, value_type = get_args(option)
            yield from _types_at(value_type, path[1:])
            continue
        is_record = isinstance(option, type) and issubclass(option, BaseModel)
        if is_record and path[0] in option.model_fields:
            yield from _types_at(option.model_fields[path[0]].annotation, path[1:])


def _options(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, and any other type itself, without what annotates it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _options(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for option in get_args(annotation):
            yield from _options(option)
    else:
        yield annotation


def _deepest(annotations: Iterable[Any]) -> float:
    return max(map(_depth, annotations), default=0)


def _depth(annotation: Any) -> float:
    depth = 0.0
    for option in _options(annotation):
        if option is Any:
            return math.inf
        if get_origin(option) in (list, tuple):
            items = [item for item in get_args(option) if item is not Ellipsis]
            depth = max(depth, 1 + _deepest(items))
    return depth
