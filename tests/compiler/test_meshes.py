"""Replicas of a sharded model in a plan: what is refused, shown and priced."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.autoplace import autoplace
from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import ASSUMED, WORST, Rates
from rlgraph.costs.formulas import Tokens, replica_bytes, score_bytes, update_bytes, update_seconds
from rlgraph.costs.hardware import FOLDER
from rlgraph.costs.memory import EngineComponent, Footprint
from rlgraph.costs.model_size import size_of
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.ir.mesh import Mesh
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.printing.plan_diff import differences
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.plan_file import parse
from rlgraph.request import PlanRequest
from rlgraph.search.layout import PoolLayout
from rlgraph.search.layout_search import meshes
from rlgraph.search.text import contest_text
from usual_settings import usual

EIGHT = ["models.policy.path=Qwen/Qwen3-8B", "models.ref.path=Qwen/Qwen3-8B"]
SHARDED = [f"models.{name}.train.shard=8" for name in ("policy", "ref")]
CLUSTER = load_cluster("h100-64")


def planned(*settings: str) -> Plan:
    return compile_graph("grpo", [*EIGHT, *settings], target=Target("h100-64", margin=0.0))


def step_of(plan: Plan, node: str) -> Step:
    return next(step for step in plan.steps if step.node == node)


@pytest.mark.parametrize("shard", [8, 24])
def test_copies_that_do_not_fill_the_pool_are_refused_at_their_line(shard: int, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"graph: own\nextends: grpo\nedits:\n  - set: {{models.policy.train.shard: {shard}}}\n")
    with pytest.raises(GraphError) as caught:
        compile_graph(str(path), devices=12)
    said = str(caught.value)
    assert f"{path}:4:" in said
    assert (
        f"12 devices, which `policy` can't share out in groups of {shard} (models.policy.train.shard)" in said
    )
    assert f"give one of 1, 2, 3, 4, 6, 12, or the pool a multiple of {shard}" in said


def test_the_pool_of_the_model_counts_not_all_devices() -> None:
    pools = ["pools={train: {devices: 4}, gen: {devices: 2}}", "models.policy.serve.pool=gen"]
    plan = compile_graph("grpo", [*pools, "models.policy.train.shard=2"])
    assert plan.meshes["policy"] == Mesh(2, 2) and plan.meshes["ref"] == Mesh(1, 4)
    with pytest.raises(GraphError, match="`train` has 4 devices, which `policy` can't share out"):
        compile_graph("grpo", [*pools, "models.policy.train.shard=6"])


def test_a_plan_shows_a_mesh_only_where_there_are_replicas() -> None:
    plain, sharded = compile_graph("grpo", (), 8), compile_graph("grpo", ["models.ref.train.shard=2"], 8)
    assert "replicas" not in plan_text(plain)
    assert plan_text(compile_graph("grpo", ["models.ref.train.shard=8"], 8)) == plan_text(plain)
    assert "model ref: frozen, head lm, held by fsdp (float32, 2-way shard x 4 replicas)" in plan_text(
        sharded
    )
    assert "model policy: trained, head lm, held by fsdp (float32) and" in plan_text(sharded)
    assert differences(plain, sharded) == ["model ref: train.shard: null -> 2"]
    assert parse(sharded.json(), "plan.json").meshes["ref"] == Mesh(4, 2)


def test_a_run_may_go_on_on_another_mesh() -> None:
    plain = compile_graph("grpo", (), 8)
    for setting in ("train.shard=2", "train.shard=null", "train={shard: 4}"):
        assert compile_graph("grpo", [f"models.policy.{setting}"], 8).digest == plain.digest
    other = compile_graph("grpo", ["models.policy.train={shard: 4, micro_tokens: 8192}"], 8)
    assert other.digest == compile_graph("grpo", ["models.policy.train.micro_tokens=8192"], 8).digest
    assert other.digest != plain.digest


def test_one_that_shares_the_weights_of_another_has_its_mesh() -> None:
    lora = "models.policy.train={lora: {rank: 4}, shard: 2}"
    plan = compile_graph("grpo", ["models.policy.path=a/b", "models.ref.path=a/b", lora], 8)
    assert plan.models["ref"].shares == "policy" and plan.meshes["ref"] == Mesh(4, 2)


def test_a_device_holds_its_part_of_one_copy() -> None:
    few, all_devices = planned(*SHARDED), planned()
    held = []
    for plan in (few, all_devices):
        footprint = Footprint(plan, CLUSTER, workload(plan), sizes_of(plan))
        held.append(footprint.items("main"))
        update = footprint.passing(step_of(plan, "update_policy"))["head"]
        held[-1] = {**held[-1], "gradients": update["gradients"]}
    for item in (
        EngineComponent("policy", "train", "parameters"),
        EngineComponent("policy", "train", "optimizer"),
        "gradients",
    ):
        assert held[0][item] == 8 * held[1][item]
    assert (
        held[0][EngineComponent("ref", "train", "parameters")]
        == 8 * held[1][EngineComponent("ref", "train", "parameters")]
    )


def test_bytes_and_seconds_of_replicas_by_hand() -> None:
    size = size_of("Qwen/Qwen3-8B")
    n, shard = size.parameters, size.on_device(8)
    work = Tokens(tokens=0, squares=0, passes=10)
    rates, host = (Rates(CLUSTER, 8, "bfloat16", WORST, replicas=copies) for copies in (8, 1))
    assert score_bytes(size, rates, 3) == pytest.approx(3 * 2 * n * 7 / 8)
    ends = 2 * 151936 * 4096 + 4096  # gathered once
    assert update_bytes(size, rates, 10, 2) == pytest.approx(10 * (8 * n - 2 * ends) * 7 / 8)
    summed = replica_bytes(shard, rates, 2)
    assert summed == pytest.approx(2 * 2 * 7 / 8 * 4 * n / 8)  # once per optimizer step, by a ring
    assert replica_bytes(shard, host, 2) == 0
    # as on one host, and then the sum between hosts
    expected = update_seconds(size, host, work, 2) + summed / (50e9 * ASSUMED.link[WORST])
    assert update_seconds(size, rates, work, 2, summed=summed) == pytest.approx(expected)


def test_rows_of_the_mesh_inside_hosts_gather_inside_them() -> None:
    assert CLUSTER.link(0, 8, 8) == CLUSTER.link(0, 8) == CLUSTER.intra_link
    assert CLUSTER.link(4, 4, 3) == CLUSTER.intra_link
    assert (CLUSTER.link(4, 8, 2), CLUSTER.link(0, 3, 4)) == (4 * CLUSTER.inter_link, CLUSTER.inter_link)
    assert CLUSTER.link(0, 64) == 8 * CLUSTER.inter_link


def test_a_plan_of_replicas_receives_less_and_is_faster_between_hosts() -> None:
    micro = ["prompts.batch=2048", *(f"models.{name}.train.micro_tokens=2048" for name in ("policy", "ref"))]
    few, all_devices = planned(*SHARDED, *micro), planned(*micro)
    for node in ("old_logprobs", "ref_logprobs", "update_policy"):
        one, other = step_of(few, node), step_of(all_devices, node)
        assert one.seconds and other.seconds and one.seconds[1] < other.seconds[1]
    sync = [next(step for step in plan.steps if step.kind == "sync") for plan in (few, all_devices)]
    size = size_of("Qwen/Qwen3-8B")
    assert [step.bytes for step in sync] == [2 * (n - 1) * size.on_device(n) for n in (8, 64)]
    assert few.peak and all_devices.peak and few.peak["main"].bytes > all_devices.peak["main"].bytes


def test_what_fits_only_over_all_devices_says_so() -> None:
    large = [f"models.{name}.path=Qwen/Qwen3-32B" for name in ("policy", "ref")]
    planned(*large)
    with pytest.raises(GraphError, match=r"does not fit(.|\n)*train\.shard=null"):
        planned(*large, *usual(["models.policy.train.shard=8"]))


def test_the_search_tries_replicas_between_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.search.layout_search.MICRO", (16384,))
    path = tmp_path / "sixteen.yaml"
    path.write_text(
        (FOLDER / "h100-8.yaml")
        .read_text()
        .replace("hosts: 1", "hosts: 2")
        .replace("inter_link: 50e9", "inter_link: 5e9")
    )
    given = [*EIGHT, "models.policy.serve.engine=transformers"]
    found, compilation = autoplace(PlanRequest("grpo", given, target=Target(str(path))))
    best = compilation.plan
    assert {candidate.layout.shard for candidate in found if candidate.layout} == {None, 8}
    assert found[0].layout and found[0].layout.shard == 8
    assert best.meshes["policy"] == best.meshes["ref"] == Mesh(2, 8)
    said = contest_text(found)
    assert "main 16, 8-way shard" in said and "models.policy.train.shard=8" in said
    _, compilation = autoplace(PlanRequest("grpo", given, target=Target("h100-8")))
    one_host = compilation.plan
    assert one_host.meshes["policy"] == Mesh(1, 8)
    assert one_host.models["policy"].train and one_host.models["policy"].train.shard is None


def test_a_search_tries_one_copy_where_the_graph_asks_for_replicas() -> None:
    layout = PoolLayout(0, frozenset(), 1, 16384, False)
    for asked, tried in (("4", {8, 16}), ("null", {8})):
        plan = compile_graph("grpo", [f"models.policy.train.shard={asked}"], 16)
        assert {one.shard for one in meshes(plan, layout, 16, 8)} == tried
