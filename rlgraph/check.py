"""Reports the outcome of a check as data, for editors and other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlgraph.compiler import Lowered, compile_graph
from rlgraph.errors import GraphError, Problem
from rlgraph.frontend.compose import compose
from rlgraph.ir.plan import Plan, Target
from rlgraph.syntax.source import Tree
from rlgraph.variables import hidden
from rlgraph.warnings.laws import warnings_of

Look = Callable[[Plan, Tree], Sequence[Problem]]


def check_graph(
    graph: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    target: Target | None = None,
    look: Look | None = None,
    strict: bool = False,
) -> tuple[Plan, list[Problem]]:
    """Return the plan of a graph in which nothing is wrong, on whatever machine it is checked, and warnings.

    Args:
        graph: a path, or the name of a shipped graph.
        overrides: ``key=value`` settings.
        devices: as many as the groups of the graph's engines fit into, unless given.
        target: the cluster to check it for.
        look: raises what is wrong with models, data, tools and sandboxes, as a run does before it starts, and
            returns what is likely not meant.
        strict: raise warnings too.

    Raises:
        GraphError: with every problem found.
    """
    lowered: list[Lowered] = []
    plan = compile_graph(graph, overrides, devices or 0, target, seen=lowered.append)
    seen = look(plan, compose(graph, overrides)) if look else ()
    return plan, [*warnings_of(plan, strict, lowered[0]), *seen]


def check_report(
    graph: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    target: Target | None = None,
    look: Look | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """Return the data that ``rlgraph check --format json`` prints.

    It has ``ok``; ``problems`` and ``warnings``, each as ``problem_record`` makes it, with ``strict`` all of
    them problems; ``open``, the paths of values written ???; ``steps``, how many the plan of an iteration
    has; ``pools``, the devices that it was checked with. Of a graph with problems the last four are not
    known: empty lists and null. See ``check_graph``.
    """
    try:
        plan, warnings = check_graph(graph, overrides, devices, target, look, strict)
    except GraphError as error:
        problems = [problem_record(problem) for problem in error.problems]
        found: dict[str, Any] = {"warnings": [], "open": [], "steps": None, "pools": None}
        return {"ok": False, "problems": problems, **found}
    found = {"open": list(plan.open_values), "steps": len(plan.steps), "pools": dict(plan.pools)}
    return {"ok": True, "problems": [], "warnings": [*map(problem_record, warnings)], **found}


def problem_record(problem: Problem) -> dict[str, Any]:
    """Return a problem with its place: in a file, in an override of the command line, or nowhere.

    ``grade`` is ``error`` or ``warning``. ``line`` and ``column`` count from 1, in ``file`` or in
    ``override``, of which one at least is null. ``accepted`` lists what may stand there, ``remedy`` says how
    to mend it, ``drawing`` is the piece of the graph that it is about; they are empty where there is nothing
    to say.
    """
    mark = problem.mark
    typed = mark is not None and mark.source.name == "command line"
    return {
        "kind": problem.kind,
        "grade": problem.grade,
        "law": hidden(problem.law),
        "file": mark.source.name if mark and not typed else None,
        "override": mark.source.text if mark and typed else None,
        "line": mark.line if mark else None,
        "column": mark.column if mark else None,
        "accepted": list(problem.accepted),
        "remedy": problem.remedy,
        "drawing": problem.drawing,
    }
