"""From a graph's name to its plan, as one function."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlgraph import __version__
from rlgraph.bind import bind
from rlgraph.compose import compose
from rlgraph.errors import GraphError, Problem
from rlgraph.evaluation import bind_evaluation, evaluation_every
from rlgraph.graph import Graph
from rlgraph.passes import PASSES
from rlgraph.plan import Origin, Plan, make_plan
from rlgraph.source import Tree
from rlgraph.verify import verify

INDECISIVE = ("about", "eval", "pools", "schedule")


def compile_graph(graph: str, overrides: Sequence[str] = (), devices: int | None = None) -> Plan:
    """Check a graph and plan it.

    Args:
        graph: a path, or the name of a shipped graph.
        overrides: ``key=value`` settings, applied last.
        devices: how many devices ``auto`` stands for; those of this machine unless given.

    Raises:
        GraphError: with every problem found.
    """
    return compose_and_plan(graph, overrides, devices)[1]


def compose_and_plan(
    graph: str, overrides: Sequence[str] = (), devices: int | None = None
) -> tuple[Tree, Plan]:
    """The composed graph, and its plan, which remembers what it was made from; as ``compile_graph``."""
    tree = compose(graph, overrides)
    count = devices or local_devices()
    origin = Origin(graph, tuple(overrides), count, __version__, tree.plain())
    return tree, replace(plan_tree(tree, count), origin=origin)


def plan_tree(tree: Tree, devices: int) -> Plan:
    """The plan of a composed graph."""
    train = bind(tree, devices)
    evaluation = bind_evaluation(tree, devices)
    lowered, *rest = lower_all([train, *([evaluation] if evaluation else ())])
    return make_plan(lowered, rest[0] if rest else None, evaluation_every(tree), digest(tree))


def lower_all(graphs: Sequence[Graph]) -> list[Graph]:
    """Each graph through all passes; the problems of all of them together, each once."""
    done: list[Graph] = []
    problems: list[Problem] = []
    for graph in graphs:
        try:
            done.append(lower(graph))
        except GraphError as error:
            problems += error.problems
    if problems:
        raise GraphError(dict.fromkeys(problems))
    return done


def digest(tree: Tree) -> str:
    """Of all that decides the numbers of a run: not how long it runs, nor on what."""
    decisive = {name: child.plain() for name, child in tree.items.items() if name not in INDECISIVE}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def lower(graph: Graph) -> Graph:
    """A bound graph through all passes, verified after each."""
    for apply in PASSES:
        graph = apply(graph)
        verify(graph, apply.__name__)
    return graph


def local_devices() -> int:
    """GPUs of this machine, or, where there is none, one CPU slot a core, at most 4."""
    gpus = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        return len([device for device in visible.split(",") if device.strip()]) or 1
    return len(gpus) or min(len(os.sched_getaffinity(0)), 4)
