"""The shipped graphs: where they lie, and what a user can learn from them."""

from __future__ import annotations

from pathlib import Path

from rlgraph import source


def shipped_graphs() -> dict[str, Path]:
    """Name -> file of every shipped graph."""
    return {path.stem: path for path in sorted(graphs_folder().glob("*.yaml"))}


def graphs_folder() -> Path:
    """Where the shipped graphs lie: the package ``rlgraph.graphs``."""
    import rlgraph.graphs

    return Path(next(iter(rlgraph.graphs.__path__)))


def example(column: str) -> str:
    """The node with which shipped ``ppo`` writes a column, as a line of a graph; nothing where it has none.

    Example:
        >>> example("values")
        'values: {op: values, model: critic}'
    """
    node = source.read(shipped_graphs()["ppo"]).items["nodes"].get(column)
    return f"{column}: {_flow(node.plain())}" if node else ""


def _flow(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    return str(value)
