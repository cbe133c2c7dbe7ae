"""Reports the outcome of a check as data, for editors and other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, Problem
from rlgraph.frontend.compose import compose
from rlgraph.ir.plan import Plan, Target
from rlgraph.syntax.source import Tree
from rlgraph.variables import hidden

Look = Callable[[Plan, Tree], None]


def check_graph(
    graph: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    target: Target | None = None,
    look: Look | None = None,
) -> Plan:
    """Return the plan of a graph in which nothing is wrong, on whatever machine it is checked.

    Args:
        graph: a path, or the name of a shipped graph.
        overrides: ``key=value`` settings.
        devices: as many as the groups of the graph's engines fit into, unless given.
        target: the cluster to check it for.
        look: raises what is wrong with models, data, tools and sandboxes, as a run does before it starts.

    Raises:
        GraphError: with every problem found.
    """
    plan = compile_graph(graph, overrides, devices or 0, target)
    if look:
        look(plan, compose(graph, overrides))
    return plan


def check_report(
    graph: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    target: Target | None = None,
    look: Look | None = None,
) -> dict[str, Any]:
    """Return the data that ``rlgraph check --format json`` prints.

    It has ``ok``; ``problems``, each as ``problem_record`` makes it; ``open``, the paths of values written
    ???; ``steps``, how many the plan of an iteration has; ``pools``, the devices that it was checked with. Of
    a graph with problems the last three are not known: an empty list and null. See ``check_graph``.
    """
    try:
        plan = check_graph(graph, overrides, devices, target, look)
    except GraphError as error:
        problems = [problem_record(problem) for problem in error.problems]
        return {"ok": False, "problems": problems, "open": [], "steps": None, "pools": None}
    found = {"open": list(plan.open_values), "steps": len(plan.steps), "pools": dict(plan.pools)}
    return {"ok": True, "problems": [], **found}


def problem_record(problem: Problem) -> dict[str, Any]:
    """Return a problem with its place: in a file, in an override of the command line, or nowhere.

    ``line`` and ``column`` count from 1, in ``file`` or in ``override``, of which one at least is null.
    ``accepted`` lists what may stand there, ``remedy`` says how to mend it, ``drawing`` is the piece of the
    graph that it is about; they are empty where there is nothing to say.
    """
    mark = problem.mark
    typed = mark is not None and mark.source.name == "command line"
    return {
        "kind": problem.kind,
        "law": hidden(problem.law),
        "file": mark.source.name if mark and not typed else None,
        "override": mark.source.text if mark and typed else None,
        "line": mark.line if mark else None,
        "column": mark.column if mark else None,
        "accepted": list(problem.accepted),
        "remedy": problem.remedy,
        "drawing": problem.drawing,
    }
