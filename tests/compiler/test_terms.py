"""Losses that join an update, in plans: what they cost, how long columns live for them, and new names."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.frontend.compose import compose
from rlgraph.ir.actions import RunOp
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.printing.plan_text import plan_text

DATA = {"prompts": "prompts.files=[a.jsonl]", "examples": "examples.files=[b.jsonl]"}
PREDICT = "predict: {op: update.policy, model: policy, loss: {kind: sft}, joins: update_policy}"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, parent in (("beside", "grpo"), ("seldom", "ppo")):
        text = f"graph: {name}\nextends: {parent}\nedits:\n  - add: {{{PREDICT}}}\n"
        Path(f"{name}.yaml").write_text(text)
    renamed = "graph: renamed\nextends: chord\nedits:\n  - rename: {update_policy: learn}\n"
    Path("renamed.yaml").write_text(renamed)


def planned(graph: str, *settings: str) -> Plan:
    data = [setting for node, setting in DATA.items() if node in compose(graph).items["nodes"].items]
    return compile_graph(graph, [*data, "prompts.batch=64", *settings], target=Target("h100-8"))


def step(plan: Plan, node: str) -> Step:
    return next(one for one in plan.steps if one.node == node)


def worst(plan: Plan, node: str) -> float:
    seconds = step(plan, node).seconds
    assert seconds
    return seconds[1]


def test_an_update_takes_the_time_of_what_joins_it_in_passes_of_their_own() -> None:
    alone, shared = planned("grpo"), planned("beside.yaml")
    few, many = planned("chord"), planned("chord", "examples.batch=4096")
    assert worst(shared, "update_policy") == worst(alone, "update_policy")
    assert worst(many, "update_policy") > worst(few, "update_policy") > worst(alone, "update_policy")
    assert worst(many, "imitate") < 0.1 * worst(many, "update_policy")
    assert shared.peak == alone.peak  # and what joins needs no engine, nor memory, by itself
    joins = "joins   the optimizer steps of update_policy, in "
    assert f"{joins}a pass of its own" in plan_text(few)
    assert f"{joins}the pass over the same tokens" in plan_text(shared)


def test_the_update_frees_what_has_joined_it() -> None:
    plan = planned("chord")
    imitate, lead = step(plan, "imitate"), step(plan, "update_policy")
    assert imitate.id < lead.id and imitate.id in lead.after
    assert not imitate.frees and {*imitate.reads} <= {*lead.frees}
    assert isinstance(imitate.action, RunOp) and not imitate.action.updates
    assert [one.node for one in plan.updates("policy")] == ["update_policy"]
    assert plan.new_versions(1) == {"policy": 1}


def test_a_schedule_ends_with_the_steps_of_the_update_alone() -> None:
    ends = [
        planned(graph, "models.policy.optimizer.schedule=linear", "update_policy.minibatches=4").models
        for graph in ("grpo", "chord")
    ]
    assert ends[0]["policy"].optimizer == ends[1]["policy"].optimizer


def test_what_joins_follows_the_update_into_the_iterations_in_which_it_runs() -> None:
    plan = planned("seldom.yaml", "update_policy.from=5")  # the critic is trained before
    assert step(plan, "predict").when == step(plan, "update_policy").when != ()
    several = planned("chord", "update_policy.minibatches=4", "update_policy.epochs=2")
    attributes = several.functions["train"]["imitate"].attributes
    assert (attributes["minibatches"], attributes["epochs"]) == (4, 2)


def test_a_new_name_of_the_update_is_that_of_what_it_is_joined_by() -> None:
    assert compose("renamed.yaml").at(("nodes", "imitate", "joins")).value == "learn"
    assert step(planned("renamed.yaml"), "imitate").joins == "learn"
