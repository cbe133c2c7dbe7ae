"""A compilation makes each stage once, and each from the one before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlgraph import lowering
from rlgraph.compiler import Compilation, compile_graph
from rlgraph.errors import GraphError
from rlgraph.frontend.bind import bind
from rlgraph.request import PlanRequest
from rlgraph.syntax.source import Tree

COLD = "rollout.temperature=0"  # samples of a prompt are all the same: a warning


def test_plan_and_warnings_bind_the_graph_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Tree] = []

    def counted(tree: Tree, devices: int, device: str) -> object:
        bound.append(tree)
        return bind(tree, devices, device)

    monkeypatch.setattr(lowering, "bind", counted)
    compilation = Compilation(PlanRequest("grpo", [COLD], 1))
    assert not bound, "nothing is made before it is needed"
    assert compilation.plan.steps and [problem.kind for problem in compilation.warnings] == ["greedy"]
    assert [tree for tree in bound if tree is compilation.tree] == [compilation.tree]


def test_strict_makes_errors_of_warnings() -> None:
    compilation = Compilation(PlanRequest("grpo", [COLD], 1))
    assert compilation.warn(strict=False) == compilation.warnings
    with pytest.raises(GraphError) as caught:
        compilation.warn(strict=True)
    assert [problem.grade for problem in caught.value.problems] == ["error"]


def test_edits_that_no_file_has_are_in_plan_and_warnings() -> None:
    plain = Compilation(PlanRequest("grpo", devices=1))
    cold = Compilation(PlanRequest("grpo", [COLD], 1)).written
    edited = Compilation(replace(plain.request, edited=cold))
    assert not plain.warnings and [problem.kind for problem in edited.warnings] == ["greedy"]
    assert edited.plan.digest != plain.plan.digest


def test_a_request_made_again_from_a_plan_gives_the_same_plan() -> None:
    plan = compile_graph("grpo", ["rollout.n=4"], 2)
    assert plan.origin
    assert Compilation(PlanRequest.again(plan.origin, plan.device)).plan == plan


def test_a_tree_that_cannot_be_composed_reports_what_else_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("graph: mine\nextends: grpo\nedits: [{set: {rolout.n: 4}}, {set: {rollout.n: many}}]\n")
    with pytest.raises(GraphError) as caught:
        _ = Compilation(PlanRequest(str(path), devices=1)).tree
    assert len(caught.value.problems) == 2
