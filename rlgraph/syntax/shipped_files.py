"""The folder of the shipped graphs: an error there is mended by an edit, not in the file."""

from __future__ import annotations

from pathlib import Path

from rlgraph.errors import Mark


def graphs_folder() -> Path:
    """Return the folder of the shipped graphs: the package ``rlgraph.graphs``."""
    import rlgraph.graphs

    return Path(next(iter(rlgraph.graphs.__path__)))


def is_shipped(mark: Mark) -> bool:
    """Return whether a place is in a shipped graph."""
    return Path(mark.source.name).parent == graphs_folder()
