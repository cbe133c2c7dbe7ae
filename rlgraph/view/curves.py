"""Gathers the curves of several runs for one page: a line for all that differ in the seed alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlgraph.reports.measured import metrics_so_far
from rlgraph.view.recorded import POINTS, thinned_series
from rlgraph.view.subject import Subject

LEAST_POINTS = 100  # of a curve, however many runs a page has
SEED = "seed"  # what runs of one line may differ in


def grouped_by_seed(runs: Sequence[Subject]) -> list[list[Subject]]:
    """Return runs in groups of equal graphs but for the seed, in the order of their first runs.

    A run of a plan that does not say what it was made from is a group of its own.
    """
    groups: dict[str, list[Subject]] = {}
    for number, run in enumerate(runs):
        key = str(number)
        if run.plan.origin:
            graph = {name: value for name, value in run.plan.origin.composed.items() if name != SEED}
            key = json.dumps(graph, sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def curves_of_runs(runs: Sequence[Subject]) -> list[dict[str, Any]]:
    """Return the lines of some runs as ``curves`` does, each named by the folders of its runs."""
    lines = []
    for group in grouped_by_seed(runs):
        folders = [run.run_dir for run in group if run.run_dir]
        lines.append((", ".join(map(str, folders)), folders))
    return curves(lines)


def curves(lines: Sequence[tuple[str, Sequence[Path]]]) -> list[dict[str, Any]]:
    """Return what a page's charts draw of lines, each a name and the folders of its runs.

    The more runs there are, the fewer points has the curve of each. A run that has written no metrics yet is
    left out.
    """
    count = sum(len(folders) for _, folders in lines)
    points = max(POINTS // max(count, 1), LEAST_POINTS)
    drawn = []
    for name, folders in lines:
        runs = []
        for folder in folders:
            metrics = metrics_so_far(folder)
            if metrics:
                runs.append({"name": str(folder), "metrics": thinned_series(metrics, points)})
        drawn.append({"name": name, "runs": runs})
    return drawn
