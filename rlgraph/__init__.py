"""rlgraph: a compiler for reinforcement-learning post-training of language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlgraph.version import VERSION as __version__

if TYPE_CHECKING:
    from rlgraph.api import Algorithm, Difference, Planned, Run, diff, load

__all__ = ["Algorithm", "Difference", "Planned", "Run", "__version__", "diff", "load"]


def __getattr__(name: str) -> Any:
    """Import the API at its first use, so that a module of rlgraph loads without all others."""
    if name not in __all__:
        raise AttributeError(f"module `rlgraph` has no attribute `{name}`")
    return getattr(import_module("rlgraph.api"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
