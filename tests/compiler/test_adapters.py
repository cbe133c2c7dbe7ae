"""``serve.lora`` in plans: what a sync sends, what it costs, what is refused."""

from __future__ import annotations

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.lora_size import SLOTS, adapters_on_device, served_parts
from rlgraph.costs.memory import EngineComponent, Footprint, away_items
from rlgraph.costs.model_size import size_of
from rlgraph.costs.pricing import sizes_of, sync_buckets, sync_least
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.ir.actions import Kind, MoveEngine, Sync
from rlgraph.ir.chosen import chosen_settings
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.printing.headline import headline
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.plan_file import parse
from rlgraph.syntax.model_settings import Lora

EIGHT, MIXTURE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
POOLS = ("pools={train: {devices: 4}, gen: {devices: 4}}", "models.policy.serve.pool=gen")
EMBEDDED = "models.policy.serve.engine=transformers"
REPLICAS = ("models.policy.serve.tensor_parallel=2", "models.policy.serve.sglang.attention_replicas=2")
ADAPTER = 2 * adapters_on_device(size_of(EIGHT), Lora(rank=32), 1)  # bytes in bfloat16


def planned(*more: str, devices: int | None = None, lora: str = "{rank: 32}") -> Plan:
    settings = [f"models.{name}.path={EIGHT}" for name in ("policy", "ref")]
    settings += [f"models.policy.train.lora={lora}"] if lora else []
    return compile_graph("grpo", [*settings, *more], devices, Target("h100-8"))


def sync(plan: Plan) -> Step:
    (step,) = [step for step in plan.steps if isinstance(step.action, Sync)]
    return step


def way(plan: Plan) -> str | None:
    serve = plan.models["policy"].serve
    assert serve
    return serve.lora


def test_an_adapter_is_served_where_weights_would_go_to_another_pool() -> None:
    assert way(planned(*POOLS)) == "adapter"
    assert way(planned(devices=8)) == "merged"
    assert way(planned("models.policy.serve.lora=adapter", devices=8)) == "adapter"
    assert way(planned(*POOLS, "models.policy.serve.lora=merged")) == "merged"
    assert way(planned(*POOLS, EMBEDDED)) == "merged"
    assert way(planned(*POOLS, EMBEDDED, "models.policy.serve.lora=adapter")) == "adapter"
    assert way(planned(*POOLS, "models.policy.serve.sglang.addresses=[http://a:1]")) == "merged"
    assert way(planned(*POOLS, *REPLICAS)) == "merged"
    assert way(planned(*POOLS, "models.policy.serve.sglang.options={attention_backend: fa3}")) == "adapter"
    assert way(planned(*POOLS, lora="{rank: 8, targets: [q_proj]}")) == "merged"
    assert way(planned(*POOLS, lora="{rank: 8, targets: [q_proj, k_proj, v_proj]}")) == "adapter"
    assert way(planned(*POOLS, lora="")) is None
    plan = planned(*POOLS)
    assert parse(plan.json(), "plan.json").models == plan.models


def test_a_sync_is_priced_by_the_adapter() -> None:
    alone, merged = planned(*POOLS), planned(*POOLS, "models.policy.serve.lora=merged")
    sent = sync(alone).action
    assert isinstance(sent, Sync) and sent.path == "broadcast"
    assert sync(alone).bytes == ADAPTER == sync_least(alone, sent)
    assert sync_buckets(alone, sent) == (1, "bfloat16")
    assert sync(merged).bytes == 2 * size_of(EIGHT).parameters > 90 * ADAPTER
    for best_or_worst in (0, 1):
        assert sync(alone).seconds[best_or_worst] < sync(merged).seconds[best_or_worst] / 10
    own = sync(planned("models.policy.serve.lora=adapter", devices=8))
    assert own.action.path == "ipc" and own.bytes == 7 * ADAPTER // 8  # each has an eighth of it


def test_the_plan_says_what_is_sent() -> None:
    text = plan_text(planned(*POOLS))
    assert "sglang (bfloat16, adapter in one of 2 slots beside frozen weights)" in text
    assert "sends   its adapter alone, which takes the place of the version before" in text
    assert "adapter alone" not in plan_text(planned(devices=8))


def test_memory_has_room_for_slots_and_weights_that_stay() -> None:
    small = ("models.policy.serve.lora=adapter", "rollout.n=2", "models.policy.serve.cache_tokens=300000")
    plan = planned(*small, devices=1)
    footprint = Footprint(plan, load_cluster("h100-8"), workload(plan), sizes_of(plan))
    items = footprint.items("main")
    assert items[EngineComponent("policy", "serve", "adapters")] == SLOTS * ADAPTER
    assert items[EngineComponent("policy", "serve", "base")] == 2 * size_of(EIGHT).parameters
    assert EngineComponent("policy", "serve", "weights") not in items
    assert plan.peak["main"].parts["serve weights"] == 2 * size_of(EIGHT).parameters
    moves = [step.action for step in plan.steps if isinstance(step.action, MoveEngine)]
    asleep = {part for move in moves if move.kind is Kind.SLEEP for part in move.parts}
    assert asleep == {"kv"}
    merged = planned("models.policy.serve.lora=merged", *small[1:], devices=1)
    assert "adapters" not in merged.peak["main"].parts


@pytest.mark.parametrize(
    ("settings", "law"),
    [
        (["models.policy.serve.lora=adapter"], "model `policy` trains no adapter"),
        (
            ["models.policy.train.lora={targets: [q_proj, o_proj]}", "models.policy.serve.lora=adapter"],
            "`models.policy.serve.lora` is adapter, but adapters of k_proj, q_proj, v_proj go together",
        ),
        (
            ["models.policy.train.lora={targets: [router]}", "models.policy.serve.lora=adapter"],
            "the engine sglang has no adapters of router",
        ),
        (
            ["models.policy.train.lora={targets: [experts.down_proj]}", "models.policy.serve.lora=adapter"],
            r"(?s)no adapters of experts.down_proj.*set models.policy.serve.lora=merged",
        ),
        (
            ["models.policy.train.lora={rank: 12, targets: [o_proj, experts.down_proj]}"],
            r"(?s)their rank is a multiple of 8, not 12.*set: {models.policy.train.lora.rank: 16}",
        ),
        (
            [
                "models.policy.train.lora={}",
                "models.policy.serve.lora=adapter",
                "models.policy.serve.sglang.addresses=[http://a:1]",
            ],
            "servers at addresses hold weights that the run did not choose",
        ),
        (
            [
                "models.policy.train.lora={}",
                "models.policy.serve.lora=adapter",
                *REPLICAS,
            ],
            "the engine sglang loads no adapters where attention_replicas is set",
        ),
    ],
)
def test_what_can_not_be_served_is_refused(settings: list[str], law: str) -> None:
    with pytest.raises(GraphError, match=law):
        compile_graph("grpo", ["models.policy.serve.engine=sglang", *settings], 8)


def held(plan: Plan, pool: str = "main") -> dict[EngineComponent, int]:
    return {**Footprint(plan, load_cluster("h100-8"), workload(plan), sizes_of(plan)).items(pool)}


def test_on_another_pool_the_embedded_engine_has_frozen_weights_and_an_adapter_of_its_own() -> None:
    plan = planned(*POOLS, EMBEDDED, "models.policy.serve.lora=adapter")
    assert sync(plan).bytes == ADAPTER and "adapter beside frozen weights)" in plan_text(plan)
    assert plan.peak["gen"].parts["adapters"] == ADAPTER
    items = held(plan, "gen")
    assert items[EngineComponent("policy", "serve", "adapters")] == ADAPTER
    assert items[EngineComponent("policy", "serve", "base")] == 2 * size_of(EIGHT).parameters
    assert "frozen weights" not in model_line(plan, 1), "each pool holds them, and no device holds them twice"
    named = "models.policy.train.lora={rank: 8, targets: [experts.down_proj]}"
    mixture = [f"models.{name}.path={MIXTURE}" for name in ("policy", "ref")]
    both = (EMBEDDED, "models.policy.serve.lora=adapter", "models.policy.serve.dtype=bfloat16")
    policy = compile_graph("grpo", [*mixture, *POOLS, *both, named]).models["policy"]
    assert dict(served_parts(size_of(MIXTURE), policy))["adapters"] == 2 * 48 * 128 * 8 * (2048 + 768)


def model_line(plan: Plan, number: int) -> str:
    """A line of the plan's text behind the first about the policy."""
    lines = plan_text(plan).splitlines()
    (first,) = [at for at, line in enumerate(lines) if line.startswith("  model policy:")]
    return lines[first + number]


ONCE = "    generates with the frozen weights of its train engine, held once"


def test_on_the_devices_of_the_train_engine_frozen_weights_are_held_once() -> None:
    plan = planned(EMBEDDED, devices=1)
    assert way(plan) == "adapter" and sync(plan).action.path == "memory"
    assert model_line(plan, 1) == ONCE
    items, size = held(plan), size_of(EIGHT)
    assert items[EngineComponent("policy", "serve", "adapters")] == ADAPTER
    assert (
        EngineComponent("policy", "serve", "base") not in items
        and EngineComponent("policy", "serve", "weights") not in items
    )
    assert items[EngineComponent("policy", "train", "parameters")] == 2 * size.parameters + 2 * ADAPTER
    assert "serve weights" not in plan.peak["main"].parts
    footprint = Footprint(plan, load_cluster("h100-8"), workload(plan), sizes_of(plan))
    (rollout,) = [step for step in plan.steps if step.generates]
    assert EngineComponent("policy", "train", "parameters") in footprint.needs("main", rollout)
    replicas = planned(EMBEDDED, "models.policy.train.shard=1", devices=8)
    assert model_line(replicas, 1) == ONCE and way(replicas) == "adapter"


@pytest.mark.parametrize(
    ("settings", "devices", "why"),
    [
        ([], 1, "sglang has processes of its own"),
        ([EMBEDDED], 8, "to train, 8 devices share one copy (train.shard: 1 gives each a copy for both)"),
        ([EMBEDDED, "models.policy.serve.lora=merged"], 1, "serve.lora is merged"),
        (
            [EMBEDDED, "models.policy.serve.dtype=float32"],
            1,
            "train.dtype is bfloat16 and serve.dtype float32",
        ),
    ],
)
def test_a_plan_says_why_frozen_weights_are_held_twice(settings: list[str], devices: int, why: str) -> None:
    small = ["rollout.n=2", "models.policy.serve.cache_tokens=100000"]
    plan = planned(*settings, *small, devices=devices)
    assert model_line(plan, 1) == f"    frozen weights are held a second time to generate: {why}"
    assert way(plan) == "merged" and EngineComponent("policy", "serve", "weights") in held(plan)


def test_weights_stay_for_as_long_as_either_engine_needs_them() -> None:
    """Between the steps that need them they may leave: then they leave once, and come back once."""
    settings = (EMBEDDED, "models.critic.path=Qwen/Qwen3-4B", "models.ref.path=Qwen/Qwen3-0.6B")
    plan = compile_graph(
        "ppo",
        [f"models.policy.path={EIGHT}", "models.policy.train.lora={rank: 32}", *settings],
        1,
        Target("h100-8", margin=0.05),
    )
    needed = [step for step in plan.steps if step.generates or isinstance(step.action, Sync)]
    footprint = Footprint(plan, load_cluster("h100-8"), workload(plan), sizes_of(plan))
    weights = EngineComponent("policy", "train", "parameters")
    moves = [step.action for step in plan.steps if isinstance(step.action, MoveEngine)]
    assert any((move.model, move.engine, *move.parts) == ("policy", "train", "parameters") for move in moves)
    off_device = weights in {*away_items(plan, "main")}
    for step in footprint.in_order():
        move = step.action if isinstance(step.action, MoveEngine) else None
        if move and (move.model, move.engine) == ("policy", "train") and "parameters" in move.parts:
            off_device = move.direction == "off"
        assert not (off_device and weights in footprint.needs("main", step)), step.node
        assert not (off_device and step in needed), step.node


def test_four_billion_weights_with_an_adapter_fit_on_24_gb() -> None:
    four = ["models.policy.path=Qwen/Qwen3-4B", "models.policy.train.lora={rank: 32, alpha: 64}"]
    plan = compile_graph("grpo", four, None, Target("4090-1"))
    engine = "models.policy.serve.engine"
    assert chosen_settings(plan) == {engine: "transformers"}
    assert f"{engine}=transformers; without, it does not fit" in headline(plan)["chosen"]
    assert model_line(plan, 1) == ONCE
    assert not [step for step in plan.steps if isinstance(step.action, MoveEngine)]
    assert plan.peak and plan.peak["main"].fits
    typed = compile_graph("grpo", [*four, f"{engine}=transformers"], None, Target("4090-1"))
    assert (typed.models, typed.steps, typed.peak) == (plan.models, plan.steps, plan.peak)
    assert not chosen_settings(typed) and plan.digest != typed.digest
    with pytest.raises(GraphError, match="does not fit on 4090-1") as refused:
        compile_graph("grpo", [*four, f"{engine}=sglang"], None, Target("4090-1"))
    assert f"\n    {engine}=transformers  # " in refused.value.problems[0].remedy
    roomy = compile_graph("grpo", four, None, Target("h100-1"))
    assert not chosen_settings(roomy) and roomy.digest == plan.digest


def test_adapters_of_experts_are_planned() -> None:
    mixture = [f"models.{name}.path={MIXTURE}" for name in ("policy", "ref")]
    names = "experts.gate_up_proj, experts.down_proj"
    attention, both, every = (
        planned(*POOLS, *mixture, lora=f"{{rank: 8, targets: {targets}}}")
        for targets in ("[o_proj]", f"[o_proj, {names}]", "all-linear")
    )
    added = 48 * 128 * 8 * ((2048 + 2 * 768) + (768 + 2048))  # of each layer's experts A and B, twice
    assert way(both) == "merged" and way(every) == "adapter"
    for plan, numbers in ((attention, 0), (both, added)):
        lora = plan.models["policy"].train.lora  # type: ignore[union-attr]
        assert lora and adapters_on_device(size_of(MIXTURE), lora, 1) == numbers + 48 * 8 * 6144
    adam = [p.peak["train"].parts["optimizer"] for p in (both, attention)]
    assert adam[0] - adam[1] == 2 * 4 * added // 4  # two averages in float32, over four devices
