"""The graph that a run was made from, though its file may have been moved or changed since."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, RunError
from rlgraph.files import read_json
from rlgraph.frontend.compose import as_written
from rlgraph.frontend.kept_graph import GRAPH, START


def graph_of_run(run_dir: Path, graph: str, overrides: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the graph and the ``KEY=VALUE`` that give what a run was made from.

    This is the file that the run was started with if it still says the same, so that errors and reports name
    it. Otherwise it is the copy in the run's folder, which has the settings in it.

    Args:
        run_dir: of the run.
        graph: as it was named when the run was started.
        overrides: those of then, which may have further ones behind them that rlgraph has added.

    Raises:
        GraphError: the copy can't be read.
    """
    kept = run_dir / GRAPH
    if not kept.is_file():
        return graph, (*overrides,)
    start = _start(run_dir)
    started_with = start.get("overrides", ())
    added = [override for override in overrides if override not in started_with]
    kept_tree = as_written(str(kept)).plain()
    # from another folder the same name may mean another file, with other files beside it
    if os.path.realpath(start.get("folder", ".")) == os.path.realpath("."):
        with suppress(GraphError):  # the file is gone, or is wrong now
            if as_written(graph, started_with).plain() == kept_tree:
                return graph, (*overrides,)
    return str(kept), (*added,)


def _start(run_dir: Path) -> dict[str, Any]:
    """Return how a run was started, as ``start.json`` has it; empty if it does not."""
    with suppress(RunError):
        start = read_json(run_dir / START)
        if isinstance(start, dict):
            return start
    return {}
