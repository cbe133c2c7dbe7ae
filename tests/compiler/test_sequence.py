"""``train.sequence_parallel`` in plans: what is refused, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import ASSUMED, BEST, Rates
from rlgraph.costs.formulas import exchange_bytes, exchange_seconds
from rlgraph.costs.hardware import FOLDER
from rlgraph.costs.model_size import size_of
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.planning.device_groups import sharing_sizes
from rlgraph.printing.plan_text import plan_text
from usual_settings import usual

EIGHT = "Qwen/Qwen3-8B"


def planned(ranks: int, *more: str, path: str = EIGHT, devices: int = 8, cluster: str = "") -> Plan:
    settings = [f"models.{name}.path={path}" for name in ("policy", "ref")]
    settings += [f"models.{name}.train.sequence_parallel={ranks}" for name in ("policy", "ref")]
    return compile_graph("grpo", [*settings, *more], devices, Target(cluster) if cluster else None)


def update(plan: Plan) -> Step:
    (step,) = [step for step in plan.steps if step.updated]
    return step


def test_a_pool_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        GraphError, match=r"(?s)pool `main` has 6 devices.*groups of 4 .*multiple of 4"
    ) as error:
        planned(4, devices=6)
    assert {problem.kind for problem in error.value.problems} == {"sequence-parallel"}


def test_the_plan_says_so(tmp_path: Path) -> None:
    assert "fsdp (float32, each row over 2 devices)" in plan_text(planned(2))
    assert "each row over" not in plan_text(planned(1))
    assert "each row over 3 devices)" in plan_text(planned(3, path="somebody/elses", devices=12))
    text = plan_text(planned(16, devices=16))
    assert "each row over 16 devices, 8 for its 8 key heads x 2 in a ring)" in text
    heads = {"model_type": "llama", "num_attention_heads": 6, "num_hidden_layers": 1, "vocab_size": 9}
    sizes = {"hidden_size": 6, "intermediate_size": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**heads, **sizes}))
    text = plan_text(planned(12, path=str(tmp_path), devices=12))
    assert "each row over 12 devices, 2 for its 2 key heads x 6 in a ring)" in text


def test_hosts_may_share_rows_too() -> None:
    assert sharing_sizes(planned(1, devices=32), 8) == [2, 4, 8, 16, 32]
    assert sharing_sizes(planned(1, devices=12), 6) == [2, 12]
    assert sharing_sizes(planned(1, devices=8), 8) == [2, 4, 8]


def test_long_rows_fit_on_devices_that_share_them() -> None:
    long = ["rollout.max_new_tokens=120000", "rollout.temperature=1.0", "prompts.batch=8"]
    kept = [*long, *(f"models.{name}.train.recompute=false" for name in ("policy", "ref"))]
    with pytest.raises(GraphError, match="does not fit"):
        planned(1, *usual(kept), cluster="h100-8")
    peak = planned(8, *long, cluster="h100-8").peak["main"]
    assert peak.fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tokens", "hosts", "servers"),
    [("Qwen/Qwen3-32B", 65024, 8, 2), ("Qwen/Qwen3-235B-A22B", 32256, 16, 8)],
)
def test_large_models_fit_with_rows_and_servers_over_several_devices(
    model: str, tokens: int, hosts: int, servers: int, tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text((FOLDER / "h100-8.yaml").read_text().replace("hosts: 1", f"hosts: {hosts}"))
    given = [f"models.policy.path={model}", f"rollout.max_new_tokens={tokens}"]
    with pytest.raises(GraphError) as refused:
        compile_graph("dr_grpo", usual(given), target=Target(str(cluster)))
    lines = [line.removeprefix("    or ") for line in refused.value.problems[0].remedy.splitlines()[1:]]
    offered = [line.partition("  # ")[0].split() for line in lines if " devices" not in line]
    for settings in offered:
        typed = dict(setting.split("=") for setting in settings)
        assert int(typed["models.policy.serve.tensor_parallel"]) >= servers
    assert any("models.policy.train.sequence_parallel=2" in settings for settings in offered)
    for settings in offered:
        plan = compile_graph("dr_grpo", [*given, *settings], target=Target(str(cluster)))
        assert all(peak.fits for peak in (plan.peak or {}).values())


@pytest.mark.parametrize("path", ["openai/gpt-oss-20b", "Qwen/Qwen3-Next-80B-A3B"])
def test_rows_that_cannot_be_shared_are_refused_by_name_and_not_proposed(path: str) -> None:
    given = [f"models.policy.path={path}", "rollout.max_new_tokens=300000"]
    sharing = "models.policy.train.sequence_parallel=2"
    with pytest.raises(GraphError, match="so that devices can't share its rows") as refused:
        compile_graph("dr_grpo", [*given, sharing], 8)
    assert refused.value.problems[0].accepted == ("1",)
    with pytest.raises(GraphError, match="does not fit") as refused:
        compile_graph("dr_grpo", usual(given), target=Target("h100-8"))
    assert "sequence_parallel" not in refused.value.problems[0].remedy


def test_a_run_may_go_on_with_others_that_share_rows() -> None:
    assert planned(2).digest == planned(1).digest == planned(1, "models.policy.train.shard=4").digest


def test_a_reference_that_is_the_policy_without_adapters_has_its_engine() -> None:
    lora = ["models.policy.train={lora: {rank: 4, alpha: 8.0}, sequence_parallel: 4, micro_tokens: 4096}"]
    plan = planned(1, *lora)
    policy, ref = (plan.models[name].train for name in ("policy", "ref"))
    assert plan.models["ref"].shares == "policy" and policy and ref
    assert (ref.sequence_parallel, ref.micro_tokens, ref.lora) == (4, 4096, None)


def test_all_to_alls_are_counted() -> None:
    size, cluster = size_of(EIGHT), load_cluster("h100-8")
    again = "models.policy.train.recompute=true"
    rates = {ranks: Rates(cluster, ranks, "bfloat16", BEST) for ranks in (1, 4, 16)}
    # 32 query heads, 8 of keys and of values, as many as queries that come back: each of 128 numbers
    assert exchange_bytes(size, rates[4], 400) == 36 * (32 + 8 + 8 + 32) * 128 * 100 * 2 * 3 / 4
    # of 16 ranks 8 have one key head each, and two have other tokens of it
    traded, gathered = (32 + 8 + 8 + 32) * 100 * 7 / 8, 2 * 1600 / 2
    assert exchange_bytes(size, rates[16], 1600) == 36 * (traded + gathered) * 128 * 2
    # on two hosts all-to-alls stay inside of either, and keys go over the slow link, six times in a layer
    two = cluster.model_copy(update={"hosts": 2})
    seconds = exchange_seconds(size, Rates(two, 16, "bfloat16", BEST), 1600, 1)
    inside, between = 36 * 256 * traded / cluster.intra_link, 36 * 256 * gathered / cluster.inter_link
    rest = 6 * 36 * ASSUMED.reduction[BEST]
    assert seconds == pytest.approx((inside + between) / ASSUMED.link[BEST] + rest)
    assert exchange_bytes(size, rates[1], 400) == exchange_seconds(size, rates[1], 400, 1) == 0
    assert exchange_seconds(size, rates[4], 400, 1) > exchange_bytes(size, rates[4], 400) / cluster.intra_link
    one, four = (update(planned(ranks, again, cluster="h100-8")) for ranks in (1, 4))
    assert one.bytes and four.bytes and one.seconds and four.seconds
    assert four.bytes > one.bytes and four.seconds > one.seconds
