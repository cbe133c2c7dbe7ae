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
    if node := read(shipped_graphs()["ppo"]).items["nodes"].get(column):
        return f"add a node that writes it, as graph `ppo` does: {column}: {flow(node)}"
    makers = [name for name in OPS if column in {p.name for p in load(OPS[name], name).outputs}]
    return f"op {' and op '.join(makers)} can write it; or map it: in: {{{column}: ...}}" if makers else ""
