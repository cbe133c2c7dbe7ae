"""The shipped graphs: their files, and lines of them as remedies."""

from collections.abc import Collection
from pathlib import Path

from rlgraph.nodes import OPS
from rlgraph.ops.registry import load
from rlgraph.syntax.shipped_files import graphs_folder
from rlgraph.syntax.source import read
from rlgraph.syntax.yaml_text import flow


def shipped_graphs() -> dict[str, Path]:
    """Return name -> file of every shipped graph."""
    return {path.stem: path for path in sorted(graphs_folder().glob("*.yaml"))}


def writer_of(column: str, models: Collection[str]) -> str:
    """Return how a column could be written in a graph with these models: the remedy for a missing one, or
    nothing.

    Example:
        >>> writer_of("values", ["critic"])
        'add a node that writes it, as graph `ppo` does: values: {op: values, model: critic}'
    """
    ppo = read(shipped_graphs()["ppo"])
    node = ppo.items["nodes"].get(column)
    if node:
        model = node.get("model")
        name = str(model.value) if model else ""
        if name and name not in models:
            section = ppo.at(("models", name))
            additions = f"{{models.{name}: {flow(section)}, {column}: {flow(node)}}}"
            return f"add a node that writes it, and its model, as graph `ppo` has them: add: {additions}"
        return f"add a node that writes it, as graph `ppo` does: {column}: {flow(node)}"
    writers = []
    for name in OPS:
        outputs = load(OPS[name], name).outputs
        if column in {port.name for port in outputs}:
            writers.append(name)
    if not writers:
        return ""
    return f"op {' and op '.join(writers)} can write it; or map it: in: {{{column}: ...}}"
