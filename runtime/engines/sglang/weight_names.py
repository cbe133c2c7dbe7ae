"""Checks whether servers know the weights that a sync sends by their names.

SGLang leaves out a weight whose name it does not know, without a word, and would go on with the one it holds.
The names that it knows are those of the checkpoint that it started from.
"""

from __future__ import annotations

from collections.abc import Collection

from rlgraph.errors import RunError
from rlgraph.runtime.engines.weights.pretrained import listed


def check_names(path: str, stored: Collection[str], sent: Collection[str]) -> None:
    """Check the sent names against the servers': the same on every worker, so none waits for another.

    Args:
        path: the checkpoint.
        stored: the names in its safetensors files; none where it has other files.
        sent: those of a sync.

    Raises:
        RunError: a name that the checkpoint lacks.
    """
    if stored and (unknown := sorted({*sent}.difference(stored))):
        raise RunError(
            f"{path}: a sync sent {listed(unknown)}, but the checkpoint has no weight of that name: "
            f"the SGLang server left it out, and would generate with what it holds instead\n"
            f"  write the checkpoint anew with transformers' save_pretrained, or use the embedded engine"
        )
