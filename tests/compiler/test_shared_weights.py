"""Models on the same frozen weights: who holds them, what plans count and say, and what keeps them apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.lora_size import adapters_on_device
from rlgraph.costs.memory import EngineComponent, Footprint
from rlgraph.costs.model_size import size_of
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.ir.plan import Plan
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.plan_file import parse
from rlgraph.syntax.model_settings import Lora

EIGHT = "Qwen/Qwen3-8B"
BOTH = ("models.policy.train.lora={rank: 32}", "models.critic.train.lora={rank: 16}")
APART = "each hold the same frozen weights"


def planned(*more: str, graph: str = "ppo", devices: int | None = 8) -> Plan:
    return compile_graph(graph, [f"models.policy.path={EIGHT}", *more], devices)


def shares(*more: str) -> dict[str, str]:
    return {name: model.shares for name, model in planned(*more).models.items() if model.shares}


def notes(*more: str) -> list[str]:
    return [note for note in planned(*more).notes if APART in note]


def test_what_is_frozen_alike_is_held_once() -> None:
    assert shares(*BOTH) == {"ref": "policy", "critic": "policy"}
    assert shares(BOTH[0]) == {"ref": "policy"}, "the critic trains all of its weights"
    assert shares(BOTH[1]) == {"critic": "ref"}, "the policy trains all of its weights"
    assert shares() == {} and not notes()
    assert shares(*BOTH, "models.critic.path=Qwen/Qwen3-4B") == {"ref": "policy"}
    assert not notes(*BOTH) and not notes(*BOTH, "models.critic.path=Qwen/Qwen3-4B")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            ["models.critic.train.dtype=bfloat16"],
            "policy and critic each hold the same frozen weights: train.dtype is float32 and bfloat16",
        ),
        (
            ["models.critic.train.shard=2"],
            "policy and critic each hold the same frozen weights: their meshes are 8-way shard x 1 "
            "replicas and 2-way shard x 4 replicas",
        ),
        (
            ["pools={main: {devices: 4}, more: {devices: 4}}", "models.critic.train.pool=more"],
            "policy and critic each hold the same frozen weights: train.pool is main and more",
        ),
    ],
    ids=["dtype", "mesh", "pool"],
)
def test_what_differs_is_held_apart_and_the_plan_says_why(settings: list[str], why: str) -> None:
    devices = None if settings[0].startswith("pools") else 8
    plan = planned(*BOTH, *settings, devices=devices)
    assert plan.models["critic"].shares == "" and plan.models["ref"].shares == "policy"
    assert [note for note in plan.notes if APART in note] == [why]


def test_a_model_that_weights_are_copied_onto_has_its_own(tmp_path: Path) -> None:
    graph = tmp_path / "refreshed.yaml"
    refresh = "  - add: {refresh: {op: update.copy, model: ref, of: policy@next}}\n"
    graph.write_text(f"graph: refreshed\nextends: ppo\nedits:\n{refresh}")
    plan = planned(*BOTH, graph=str(graph))
    assert {name: model.shares for name, model in plan.models.items()} == {
        "policy": "",
        "ref": "",
        "critic": "policy",
    }
    assert f"policy and ref {APART}: weights are copied onto ref" in plan.notes


def test_a_frozen_model_lies_as_the_one_that_holds_its_weights_unless_told_otherwise() -> None:
    shard = "models.policy.train.shard=2", "models.critic.train.shard=2"
    plan = planned(*BOTH, *shard)
    assert {name: model.shares for name, model in plan.models.items() if model.shares} == {
        "ref": "policy",
        "critic": "policy",
    }
    assert plan.models["ref"].train and plan.models["ref"].train.shard == 2
    own = planned(*BOTH, *shard, "models.ref.train.shard=4", "models.ref.train.micro_tokens=4096")
    ref = own.models["ref"]
    assert ref.shares == "" and ref.train and (ref.train.shard, ref.train.micro_tokens) == (4, 4096)


def test_rows_may_be_shared_by_other_numbers_of_devices() -> None:
    plan = planned(*BOTH, "models.critic.train.sequence_parallel=2")
    critic = plan.models["critic"]
    assert critic.shares == "policy" and critic.train and critic.train.sequence_parallel == 2


def test_memory_has_the_weights_once_and_each_adapter() -> None:
    cluster = load_cluster("h100-8")
    dtype = [f"models.{name}.train.dtype=bfloat16" for name in ("policy", "ref", "critic")]
    other = "models.critic.path=Qwen/Qwen3-8B-Base"
    held = []
    for more in ([], [other]):
        plan = planned(*BOTH, *dtype, *more)
        held.append(Footprint(plan, cluster, workload(plan), sizes_of(plan)).items("main"))
    shared, apart = held
    lm, value = size_of(EIGHT), size_of(EIGHT, "value")
    own = 4 * adapters_on_device(value, Lora(rank=16), 8)
    assert (
        shared[EngineComponent("policy", "train", "parameters")]
        == apart[EngineComponent("policy", "train", "parameters")]
    )
    assert shared[EngineComponent("policy", "train", "parameters")] > 2 * lm.on_device(8)
    assert shared[EngineComponent("critic", "train", "parameters")] == own
    assert apart[EngineComponent("critic", "train", "parameters")] == own + 2 * value.on_device(8)
    assert EngineComponent("ref", "train", "parameters") not in shared
    assert (
        shared[EngineComponent("critic", "train", "optimizer")]
        == apart[EngineComponent("critic", "train", "optimizer")]
    )


def test_a_step_needs_the_weights_and_its_own_parameters() -> None:
    plan = planned(*BOTH)
    footprint = Footprint(plan, load_cluster("h100-8"), workload(plan), sizes_of(plan))
    steps = {step.node: step for step in plan.steps}
    both = {
        EngineComponent("policy", "train", "parameters"),
        EngineComponent("critic", "train", "parameters"),
    }
    assert footprint.needs("main", steps["values"]) == both
    assert footprint.needs("main", steps["update_critic"]) == both | {
        EngineComponent("critic", "train", "optimizer")
    }
    assert footprint.needs("main", steps["ref_logprobs"]) == {
        EngineComponent("policy", "train", "parameters")
    }


def test_the_plan_says_so_in_text_and_json(golden: Callable[[str, str], None]) -> None:
    plan = planned(*BOTH)
    text = plan_text(plan)
    golden("plan/ppo-adapters.txt", text)
    line = "    on the weights of policy, held once: they are the same, and frozen\n"
    assert f"  model critic: trained, head value, held by fsdp (float32)\n{line}" in text
    assert f"  model ref: frozen, head lm, held by fsdp (float32)\n{line}" in text
    assert parse(plan.json(), "plan.json").models == plan.models
    assert plan.digest == planned(*BOTH).digest
