"""The evaluation that all searches share, and their goals; each goal's search has its own tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlgraph.autoplace import evaluator
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.lowering import plan_tree
from rlgraph.request import PlanRequest
from rlgraph.search import goals
from rlgraph.search.candidate import Candidate
from rlgraph.search.evaluate import Evaluator
from rlgraph.search.moves import applied, in_every_model, with_pools
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import overrides

TARGET = Target("h100-8")
NARROW = {"models.policy.train.dtype": "bfloat16", "models.policy.serve.dtype": "bfloat16"}


def of_grpo() -> Evaluator:
    return evaluator(PlanRequest("grpo", target=TARGET))


def test_a_candidate_is_what_a_user_gets_who_types_its_settings() -> None:
    candidate = of_grpo().candidate(NARROW)
    typed = compile_graph("grpo", overrides(NARROW), target=TARGET)
    assert candidate.fits and candidate.plan and typed.origin
    assert candidate.plan == typed


def test_the_same_settings_are_planned_once() -> None:
    planned: list[Tree] = []

    def make_plan(tree: Tree, devices: int) -> Plan:
        planned.append(tree)
        return plan_tree(tree, devices, "cuda")

    judge = replace(of_grpo(), make_plan=make_plan)
    first, second = judge.candidate(NARROW), judge.candidate(dict(NARROW))
    assert first is second and len(planned) == 1


def test_settings_that_the_compiler_refuses_are_a_candidate_that_says_why() -> None:
    candidate = of_grpo().candidate({"rollout.n": -1})
    with pytest.raises(GraphError) as caught:
        compile_graph("grpo", ["rollout.n=-1"], target=TARGET)
    assert candidate.plan is None and not candidate.fits
    assert candidate.why_not == caught.value.problems[0].law


def test_on_more_devices_there_are_more_hosts() -> None:
    larger = of_grpo().on(32)
    assert (larger.devices, larger.scenario.cluster.hosts) == (32, 4)
    candidate = larger.candidate(NARROW)
    assert candidate.plan and candidate.plan.pools == {"main": 32}


def test_goals_sort_by_what_they_say() -> None:
    judge = of_grpo()
    here, larger = judge.candidate(NARROW), judge.on(16).candidate(NARROW)
    refused = Candidate({}, None, "no")
    assert here.fits and larger.fits and larger.seconds < here.seconds
    assert sorted([refused, here, larger], key=goals.fit) == [larger, here, refused]
    assert min([here, larger], key=goals.faster) is larger
    assert min([here, larger], key=goals.cheaper) is here


def test_moves_change_only_what_models_allow() -> None:
    plan = compile_graph("grpo", target=TARGET)
    assert in_every_model(plan, {"train.recompute": True}).keys() <= {"models.policy.train.recompute"}
    assert not in_every_model(plan, {"train.micro_tokens": 2**30}), "a number only replaces a larger one"
    assert in_every_model(plan, {"train.micro_tokens": 1024}) == {
        "models.policy.train.micro_tokens": 1024,
        "models.ref.train.micro_tokens": 1024,
    }


def test_settings_are_applied_to_a_plan_without_compiling_its_graph() -> None:
    plan = compile_graph("grpo", target=TARGET)
    changed = applied(plan, {**with_pools({"main": 16}), "models.policy.train.micro_tokens": 1024})
    assert changed.models["policy"].train and changed.models["policy"].train.micro_tokens == 1024
    assert changed.pools == {"main": 16}
    assert {len(step.devices) for step in changed.steps} <= {1, 16}
    assert changed.models["ref"] == plan.models["ref"]
