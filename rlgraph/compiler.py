"""From a graph's name to its plan, as one function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from rlgraph import __version__
from rlgraph.bind import bind
from rlgraph.calibrate import load_calibration
from rlgraph.cluster import load_cluster
from rlgraph.compose import compose
from rlgraph.errors import GraphError, Problem
from rlgraph.evaluation import bind_evaluation, evaluation_every
from rlgraph.graph import Graph
from rlgraph.machine import local_devices
from rlgraph.passes import PASSES
from rlgraph.pipeline import pipeline
from rlgraph.plan import Origin, Plan, Target, make_plan
from rlgraph.predict import predict
from rlgraph.source import Tree
from rlgraph.verify import verify

INDECISIVE = ("about", "eval", "pools", "schedule")


def compile_graph(
    graph: str, overrides: Sequence[str] = (), devices: int | None = None, target: Target | None = None
) -> Plan:
    """Check a graph and plan it.

    Args:
        graph: a path, or the name of a shipped graph.
        overrides: ``key=value`` settings, applied last.
        devices: how many devices ``auto`` stands for; those of the target, or of this machine, unless given.
        target: the cluster to plan for: with it the plan says what it takes there, and moves engines off
            their devices where it would not fit else.

    Raises:
        GraphError: with every problem found.
    """
    return compose_and_plan(graph, overrides, devices, target)[1]


def compose_and_plan(
    graph: str, overrides: Sequence[str] = (), devices: int | None = None, target: Target | None = None
) -> tuple[Tree, Plan]:
    """The composed graph, and its plan, which remembers what it was made from; as ``compile_graph``."""
    tree = compose(graph, overrides)
    return tree, plan_composed(tree, graph, overrides, devices, target)


def plan_composed(
    tree: Tree, graph: str, overrides: Sequence[str], devices: int | None, target: Target | None
) -> Plan:
    """The plan of a composed graph, which remembers what that was made from; as ``compile_graph``."""
    cluster = load_cluster(target.cluster) if target else None
    count = devices or (cluster.total if cluster else local_devices())
    plan = plan_tree(tree, count)
    if cluster and target:
        factors = load_calibration(target.calibration) if target.calibration else None
        plan = predict(plan, cluster, target.prompt_tokens, target.response_tokens, factors)
    origin = Origin(graph, tuple(overrides), count, __version__, tree.plain(), target)
    return replace(plan, origin=origin)


def plan_tree(tree: Tree, devices: int) -> Plan:
    """The plan of a composed graph."""
    train = bind(tree, devices)
    evaluation = bind_evaluation(tree, devices)
    lowered, *rest = lower_all([train, *([evaluation] if evaluation else ())])
    plan = make_plan(lowered, rest[0] if rest else None, evaluation_every(tree), digest(tree))
    return pipeline(plan)


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
    schedule = tree.get("schedule")
    if schedule and (staleness := schedule.get("staleness")):
        decisive["staleness"] = staleness.plain()
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def lower(graph: Graph) -> Graph:
    """A bound graph through all passes, verified after each."""
    for apply in PASSES:
        graph = apply(graph)
        verify(graph, apply.__name__)
    return graph
