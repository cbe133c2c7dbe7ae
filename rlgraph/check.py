"""Reports the outcome of a check as data, for editors and other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlgraph.compiler import Compilation
from rlgraph.errors import COMMAND_LINE, GraphError, Problem
from rlgraph.ir.plan import Plan
from rlgraph.request import PlanRequest
from rlgraph.variables import hidden

Look = Callable[[Compilation], Sequence[Problem]]


def check_graph(
    request: PlanRequest, look: Look | None = None, strict: bool = False
) -> tuple[Plan, list[Problem]]:
    """Return the plan of a graph in which nothing is wrong, on whatever machine it is checked, and warnings.

    Args:
        request: the graph; it is planned for as many devices as the groups of its engines fit into, where it
            does not say for how many.
        look: raises what is wrong with models, data, tools and sandboxes, as a run does before it starts, and
            returns what is likely not meant.
        strict: raise warnings too.

    Raises:
        GraphError: with every problem found.
    """
    compilation = Compilation(replace(request, devices=request.devices or 0))
    plan = compilation.plan
    warnings_of_files = look(compilation) if look else ()
    return plan, [*compilation.warn(strict), *warnings_of_files]


def check_report(request: PlanRequest, look: Look | None = None, strict: bool = False) -> dict[str, Any]:
    """Return the data that ``rlgraph check --format json`` prints.

    It has ``ok``; ``problems`` and ``warnings``, each as ``problem_record`` makes it, with ``strict`` all of
    them problems; ``open``, the paths of values written ???; ``steps``, how many the plan of an iteration
    has; ``pools``, the devices that it was checked with. Of a graph with problems the last four are not
    known: empty lists and null. See ``check_graph``.
    """
    try:
        plan, warnings = check_graph(request, look, strict)
    except GraphError as error:
        return {
            "ok": False,
            "problems": [problem_record(problem) for problem in error.problems],
            "warnings": [],
            "open": [],
            "steps": None,
            "pools": None,
        }
    return {
        "ok": True,
        "problems": [],
        "warnings": [problem_record(warning) for warning in warnings],
        "open": list(plan.open_values),
        "steps": len(plan.steps),
        "pools": dict(plan.pools),
    }


def problem_record(problem: Problem) -> dict[str, Any]:
    """Return a problem with its place: in a file, in an override of the command line, or nowhere.

    ``grade`` is ``error`` or ``warning``. ``line`` and ``column`` count from 1, in ``file`` or in
    ``override``, of which one at least is null. ``accepted`` lists what may stand there, ``remedy`` says how
    to mend it, ``drawing`` is the piece of the graph that it is about; they are empty where there is nothing
    to say.
    """
    mark = problem.mark
    file = override = None
    if mark and mark.source.name == COMMAND_LINE:
        override = mark.source.text
    elif mark:
        file = mark.source.name
    return {
        "kind": problem.kind,
        "grade": problem.grade,
        "law": hidden(problem.law),
        "file": file,
        "override": override,
        "line": mark.line if mark else None,
        "column": mark.column if mark else None,
        "accepted": list(problem.accepted),
        "remedy": problem.remedy,
        "drawing": problem.drawing,
    }
