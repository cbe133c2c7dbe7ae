"""``train.lora.quantize`` in plans: what a device holds, who shares it, what is refused."""

from __future__ import annotations

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.lora_size import adapters_on_device
from rlgraph.costs.memory import EngineComponent, Footprint
from rlgraph.costs.model_size import size_of
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.plan_file import parse
from rlgraph.syntax.model_settings import Lora

EIGHT, MIXTURE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
FOUR_BITS = "models.policy.train.lora={rank: 32, quantize: nf4}"
EMBEDDED = "models.policy.serve.engine=transformers"
LINEAR = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)  # numbers of Qwen3-8B's layers


def planned(*settings: str, graph: str = "grpo", devices: int | None = None, cluster: str = "h100-1") -> Plan:
    return compile_graph(graph, [f"models.policy.path={EIGHT}", *settings], devices, Target(cluster))


def test_a_weight_takes_half_a_byte_and_its_share_of_a_scale() -> None:
    plan = planned(FOUR_BITS, EMBEDDED)
    footprint = Footprint(plan, load_cluster("h100-1"), workload(plan), sizes_of(plan))
    others = 2 * (size_of(EIGHT).parameters - LINEAR)
    adapter = 4 * adapters_on_device(size_of(EIGHT), Lora(rank=32), 1)
    weights = footprint.items("main")[EngineComponent("policy", "train", "parameters")]
    assert weights == LINEAR // 2 + 4 * LINEAR // 64 + others + adapter
    assert EngineComponent("policy", "serve", "base") not in footprint.items("main")
    for step in plan.steps:
        if step.models and step.generates:
            assert footprint.transient("main", step)["gathered weights"] == 2 * 4096 * 12288
    text = plan_text(plan)
    assert "held by fsdp (bfloat16, frozen linear layers in 4 bits, nf4" in text
    assert "    on the weights of policy, held once: they are the same, and frozen" in text
    assert parse(plan.json(), "plan.json").models == plan.models


def test_eight_billion_weights_fit_on_24_gb() -> None:
    plan = planned(FOUR_BITS, cluster="4090-1")
    assert plan.peak and plan.peak["main"].fits and plan.peak["main"].parts["weights"] < 7e9
    with pytest.raises(GraphError, match="does not fit on 4090-1"):
        planned("models.policy.train.lora={rank: 32}", cluster="4090-1")


def test_servers_get_weights_with_the_adapter_added() -> None:
    pools = ("pools={train: {devices: 1}, gen: {devices: 1}}", "models.policy.serve.pool=gen")
    for settings in ([], [*pools, "models.policy.serve.engine=sglang"]):
        serve = (
            planned(FOUR_BITS, *settings, cluster="h100-2" if settings else "h100-1").models["policy"].serve
        )
        assert serve and (serve.engine, serve.lora) == ("sglang", "merged")


def test_a_critic_has_weights_of_its_own_in_another_form() -> None:
    critic = "models.critic.train.lora={rank: 8}"
    plan = compile_graph("ppo", [f"models.policy.path={EIGHT}", FOUR_BITS, critic], 1)
    assert {name: model.shares for name, model in plan.models.items()} == {
        "policy": "",
        "ref": "policy",
        "critic": "",
    }
    assert any("one holds them in 4 bits (train.lora.quantize)" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("settings", "devices", "law"),
    [
        ([], 8, r"(?s)held by one device.*and pool main has 8.*set pools.main.devices=1, or leave out"),
        (
            [f"models.policy.path={MIXTURE}"],
            1,
            "`policy` is a mixture of experts, whose weights can't lie in 4",
        ),
        (
            [EMBEDDED, "models.policy.serve.lora=adapter", "models.policy.serve.dtype=float32"],
            1,
            r"(?s)reads the weights below the adapter from files.*leave out models.policy.serve.lora",
        ),
    ],
    ids=["devices", "mixture", "files"],
)
def test_what_can_not_hold_weights_in_4_bits_is_refused(settings: list[str], devices: int, law: str) -> None:
    with pytest.raises(GraphError, match=law):
        planned(FOUR_BITS, *settings, devices=devices, cluster=f"h100-{devices}")
