"""The shipped graphs: their files, and lines of them as remedies."""

from pathlib import Path

from rlgraph.nodes import OPS
from rlgraph.ops.registry import load
from rlgraph.syntax.shipped_files import graphs_folder
from rlgraph.syntax.source import read
from rlgraph.syntax.yaml_text import flow


def shipped_graphs() -> dict[str, Path]:
    """Return name -> file of every shipped graph."""
    return {path.stem: path for path in sorted(graphs_folder().glob("*.yaml"))}


def writer_of(column: str) -> str:
    """Return how a column could be written: the remedy for a missing one, or nothing.

    Example:
        >>> writer_of("values")
        'add a node that writes it, as graph `ppo` does: values: {op: values, model: critic}'
    """
    node = read(shipped_graphs()["ppo"]).items["nodes"].get(column)
    if node:
        return f"add a node that writes it, as graph `ppo` does: {column}: {flow(node)}"
    writers = []
    for name in OPS:
        outputs = load(OPS[name], name).outputs
        if column in {port.name for port in outputs}:
            writers.append(name)
    if not writers:
        return ""
    return f"op {' and op '.join(writers)} can write it; or map it: in: {{{column}: ...}}"
