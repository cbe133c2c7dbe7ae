"""Load the subject of a view: a graph, a saved plan or a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import local_device
from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, Target
from rlgraph.reports.plan_file import SETTLED, is_plan, load


@dataclass(frozen=True)
class Subject:
    """A plan, its run if any, and whether the files of its ops were loaded to make it."""

    plan: Plan
    run_dir: Path | None = None
    compiled: bool = False


def subject(
    name: str, overrides: Sequence[str] = (), devices: int | None = None, target: Target | None = None
) -> Subject:
    """Load the subject: a folder is a run, a JSON file a saved plan, all else a graph.

    Nothing of a run or a saved plan is executed: its ops' files are not loaded.

    Raises:
        GraphError: the graph is wrong, or the file or the folder holds no plan.
        RunError: a run or a saved plan was given with settings.
    """
    folder = Path(name)
    run = folder.is_dir() and (folder / "plan.json").is_file()
    if (run or is_plan(name)) and (overrides or devices or target):
        raise RunError(f"{name} {SETTLED if not run else 'is a run: it is shown as it was planned'}")
    if run:
        return Subject(load(folder / "plan.json"), folder)
    if is_plan(name):
        return Subject(load(folder))
    return Subject(compile_graph(name, overrides, devices, target, device=local_device()), compiled=True)
