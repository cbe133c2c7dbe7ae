"""Find what a graph that compiles likely does not mean: each a warning, with its place and an edit that mends
it. ``--strict`` makes errors of them."""

from __future__ import annotations

from rlgraph.errors import Problem
from rlgraph.ir.plan import Plan
from rlgraph.laws.runs import RUN_WARNINGS, SETTING_WARNINGS
from rlgraph.laws.sampling import PHASE_WARNINGS
from rlgraph.laws.training import models_of
from rlgraph.laws.views import PhaseView, RunView
from rlgraph.lowering import Lowered, plan_tree
from rlgraph.syntax.source import Tree
from rlgraph.warnings.dead_settings import dead_settings


def find_warnings(written: Tree, lowered: Lowered) -> list[Problem]:
    """Return the warnings of a graph; ``written`` is the graph with its ``${...}`` still in place."""
    plan = lowered.plan
    run = RunView(lowered.tree, lowered.train, lowered.evaluation, plan)
    problems: list[Problem] = []
    for run_law in RUN_WARNINGS:
        problems += run_law(run)
    for graph in (lowered.train, lowered.evaluation):
        if graph:
            phase = PhaseView(graph, plan, lowered.tree)
            for phase_law in PHASE_WARNINGS:
                problems += phase_law(phase)
    for setting_law in SETTING_WARNINGS:
        problems += setting_law(run)

    dropped = lowered.train.dropped
    already_reported = {("nodes", node.name) for node in dropped}
    for name in models_of(dropped):
        if name not in plan.models:
            already_reported.add(("models", name))

    def plan_of(changed: Tree) -> Plan:
        return plan_tree(changed, lowered.devices, lowered.device)

    problems += dead_settings(written, plan, already_reported, plan_of)
    return list(dict.fromkeys(problems))
