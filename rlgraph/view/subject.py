"""Load the subject of a view: a graph, a saved plan or a run directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlgraph.compiler import Compilation
from rlgraph.costs.detect import local_device
from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan
from rlgraph.reports.plan_file import SETTLED, is_plan, load
from rlgraph.request import PlanRequest


@dataclass(frozen=True)
class Subject:
    """A plan, its run if any, and whether the files of its ops were loaded to make it."""

    plan: Plan
    run_dir: Path | None = None
    compiled: bool = False


def subject(request: PlanRequest) -> Subject:
    """Load the subject that a request names: a folder is a run, a JSON file a saved plan, all else a graph.

    Nothing of a run or a saved plan is executed: its ops' files are not loaded. A graph is planned for this
    machine.

    Raises:
        GraphError: the graph is wrong, or the file or the folder holds no plan.
        RunError: a run or a saved plan was given with settings.
    """
    path = Path(request.graph)
    has_settings = bool(request.overrides or request.devices or request.target)
    if path.is_dir() and (path / "plan.json").is_file():
        if has_settings:
            raise RunError(f"{request.graph} is a run: it is shown as it was planned")
        return recorded(path)
    if is_plan(request.graph):
        if has_settings:
            raise RunError(f"{request.graph} {SETTLED}")
        return Subject(load(path))
    return Subject(Compilation(replace(request, device=local_device())).plan, compiled=True)


def recorded(folder: Path) -> Subject:
    """Load a run from its directory.

    Raises:
        GraphError: it holds no plan.
    """
    return Subject(load(folder / "plan.json"), folder)
