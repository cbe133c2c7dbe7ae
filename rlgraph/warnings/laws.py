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
    """Return the warnings of a graph, also given as written, with its ``${...}`` still in place."""
    train, evaluation, plan = lowered.train, lowered.evaluation, lowered.plan
    run = RunView(lowered.tree, train, evaluation, plan)
    problems = [problem for law in RUN_WARNINGS for problem in law(run)]
    for graph in (train, evaluation):
        if graph:
            phase = PhaseView(graph, plan, lowered.tree)
            problems += [problem for law in PHASE_WARNINGS for problem in law(phase)]
    problems += [problem for law in SETTING_WARNINGS for problem in law(run)]
    reported = {("nodes", node.name) for node in train.dropped}
    reported |= {("models", name) for name in models_of(train.dropped) if name not in plan.models}

    def plan_of(changed: Tree) -> Plan:
        return plan_tree(changed, lowered.devices, lowered.device)

    problems += dead_settings(written, plan, reported, plan_of)
    return list(dict.fromkeys(problems))
