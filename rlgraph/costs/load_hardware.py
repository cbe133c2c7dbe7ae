"""Loads the description of a cluster: a shipped one, a file's, or this machine's."""

from __future__ import annotations

from pathlib import Path

from rlgraph.costs.detect import this_machine
from rlgraph.costs.hardware import Cluster, Here, read_cluster, shipped_clusters, shipped_file
from rlgraph.errors import fail, nearest


def load_cluster(name: str, here: Here | None = None) -> Cluster:
    """Return a shipped cluster by name, the one that a YAML file describes, or what ``auto`` stands for.

    Args:
        name: the name of a shipped cluster, the path of a file, or ``auto``.
        here: what ``auto`` stands for: this machine unless given.

    Raises:
        GraphError: there is no such cluster, or the file is wrong; the error lists every problem.
    """
    if name == "auto":
        return (here or this_machine)()
    path = shipped_file(name) if name in shipped_clusters() else Path(name)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        known = ["auto", *shipped_clusters()]
        remedy = nearest(name, known) or "or give the path of a YAML file (see docs/cost_model.md)"
        raise fail("unknown-cluster", f"there is no cluster `{name}`", None, known, remedy)
    return read_cluster(path)
