"""``train.expert_parallel`` in plans: what is refused, and what it costs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlgraph.autoplace import autoplace
from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import ASSUMED, WORST, Rates
from rlgraph.costs.formulas import dispatch_bytes, dispatch_seconds, gather_bytes, sync_bound, sync_bytes
from rlgraph.costs.memory import Footprint
from rlgraph.costs.model_size import size_of
from rlgraph.costs.plan_size import largest_layer, planned_size, with_experts_divided
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.ir.mesh import Mesh
from rlgraph.ir.plan import Plan, Target
from rlgraph.printing.plan_diff import differences
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.plan_file import parse
from rlgraph.request import PlanRequest
from rlgraph.search import goals
from rlgraph.search.layout import PoolLayout
from rlgraph.search.layout_search import divisions
from rlgraph.search.text import contest_text
from usual_settings import usual

MIXTURE, DENSE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"
CLUSTER = load_cluster("h100-8")
LAYERS, EXPERTS, CHOSEN, HIDDEN, INNER = 48, 128, 8, 2048, 768


def planned(ranks: int, *more: str, path: str = MIXTURE, devices: int = 8, cluster: str = "") -> Plan:
    settings = [f"models.{name}.path={path}" for name in ("policy", "ref")]
    settings += [f"models.{name}.train.expert_parallel={ranks}" for name in ("policy", "ref")]
    fits = ["models.policy.train.optimizer_offload=true", "models.policy.serve.tensor_parallel=8"]
    return compile_graph("grpo", [*settings, *fits, *more], devices, Target(cluster) if cluster else None)


def test_the_plan_shows_the_mesh() -> None:
    one, two = planned(1), planned(2)
    assert two.meshes["policy"] == Mesh(1, 8, experts=2)
    assert "held by fsdp (float32, 8-way shard, 2-way experts" in plan_text(two)
    assert "expert" not in plan_text(one)
    assert differences(one, two) == [f"model {n}: train.expert_parallel: 1 -> 2" for n in ("policy", "ref")]
    assert parse(two.json(), "plan.json").meshes["ref"] == Mesh(1, 8, experts=2)
    copies = planned(2, *(f"models.{name}.train.shard=4" for name in ("policy", "ref")))
    assert "4-way shard x 2 replicas, 2-way experts" in plan_text(copies)


def test_a_run_may_go_on_with_all_experts_on_each_device() -> None:
    assert planned(2).digest == planned(1).digest


@pytest.mark.parametrize(
    ("setting", "name"),
    [("tensor_parallel=2", "tensor_parallel"), ("lora={rank: 4}", "lora"), ("compile=true", "compile")],
)
def test_what_it_excludes_is_refused_with_its_place(tmp_path: Path, setting: str, name: str) -> None:
    path = tmp_path / "divided.yaml"
    text = f"graph: divided\nextends: grpo\nedits:\n  - set: {{models.policy.path: {MIXTURE}}}\n"
    path.write_text(text + "  - set: {models.policy.train.expert_parallel: 2}\n")
    with pytest.raises(GraphError) as caught:
        compile_graph(str(path), [f"models.policy.train.{setting}"], 8)
    said = str(caught.value)
    assert f"{path}:5:" in said
    assert f"(models.policy.train.expert_parallel), which can't be combined with {name}" in said
    assert f"leave out models.policy.train.{name}, or set expert_parallel to 1" in said


def test_devices_and_experts_that_do_not_divide_are_refused_with_what_works() -> None:
    with pytest.raises(GraphError, match=r"(?s)pool `main` has 6 devices.*groups of 4 .*multiple of 4"):
        planned(4, "models.policy.serve.tensor_parallel=1", devices=6)
    with pytest.raises(
        GraphError, match=r"sharded over 2 devices .*shard\), which .* groups of 4 that divide"
    ) as e:
        planned(4, "models.policy.train.shard=2")
    assert e.value.problems[0].accepted == ("1", "2")
    with pytest.raises(GraphError, match="the 128 experts of `policy` can't be shared out among 24") as e:
        planned(24, devices=24)
    assert e.value.problems[0].accepted == ("1", "2", "4", "8")


def test_a_dense_model_is_refused_and_one_of_unknown_size_left_to_the_engine() -> None:
    with pytest.raises(GraphError, match="`policy` is not a mixture: it has no experts"):
        planned(2, path=DENSE)
    assert planned(3, "models.policy.serve.tensor_parallel=1", path="somebody/elses", devices=12)


def test_a_device_gathers_its_own_experts_alone() -> None:
    one = size_of(MIXTURE)
    size = with_experts_divided(one, 8)
    experts = EXPERTS * 3 * HIDDEN * INNER  # of a layer
    assert largest_layer(size, 64) == largest_layer(one, 64) - experts * 7 // 8
    assert gather_bytes(size, 64, 2) == gather_bytes(one, 64, 2) - 2 * LAYERS * experts * 7 // 8
    assert size.parameters == one.parameters and size.on_device(64) == one.on_device(64)
    # as many experts to a device on 1,024, of which 8 hold each, with the padding that there was
    assert gather_bytes(size, 1024) < gather_bytes(one, 1024) / 6
    assert planned_size(planned(4).models["policy"]).divided == 4


def test_tokens_that_travel_are_counted() -> None:
    size, rates = size_of(MIXTURE), {n: Rates(CLUSTER, n, "bfloat16", WORST) for n in (1, 8)}
    each = LAYERS * 2 * CHOSEN * 1000 * HIDDEN * 2 * 7 / 8  # there and back
    assert dispatch_bytes(size, rates[8], 1000) == each
    assert dispatch_bytes(size, rates[1], 1000) == dispatch_seconds(size, rates[1], 1000, 7) == 0
    assert dispatch_bytes(size_of(DENSE), rates[8], 1000) == 0
    seconds = each / (CLUSTER.intra_link * ASSUMED.link[WORST]) + 3 * LAYERS * 7 * ASSUMED.reduction[WORST]
    assert dispatch_seconds(size, rates[8], 1000, 7) == pytest.approx(seconds)


def test_a_sync_gathers_some_experts_and_then_the_others() -> None:
    size = with_experts_divided(size_of(MIXTURE), 2)
    others = LAYERS * EXPERTS * 3 * HIDDEN * INNER // 2
    expected = gather_bytes(size, 8, 2) + 2 * others
    sync = next(step for step in planned(2, cluster="h100-8").steps if step.kind == "sync")
    assert sync.bytes == sync_bytes(size, 8, 2) == expected
    assert sync_bound(size, 8, 2) <= sync.bytes


def test_steps_and_memory_show_what_they_take() -> None:
    one, eight = planned(1, cluster="h100-8"), planned(8, cluster="h100-8")
    for node in ("old_logprobs", "ref_logprobs", "update_policy"):
        (plain,), (divided,) = ([s for s in plan.steps if s.node == node] for plan in (one, eight))
        assert plain.bytes and divided.bytes and divided.bytes != plain.bytes and divided.seconds
    peaks = []
    for plan in (one, eight):
        (update,) = [step for step in plan.steps if step.updated]
        passing = Footprint(plan, CLUSTER, workload(plan), sizes_of(plan)).passing(update)
        peaks.append(passing["last layer"]["gathered weights"])
    assert peaks[1] < peaks[0] / 2


def test_an_uneven_choice_of_experts_takes_time_bytes_and_memory_and_is_said() -> None:
    def aimed(uneven: float | None, ranks: int) -> Plan:
        settings = [f"models.policy.path={MIXTURE}", f"models.policy.train.expert_parallel={ranks}"]
        settings += ["models.policy.train.optimizer_offload=true", "models.policy.serve.tensor_parallel=8"]
        target = Target("h100-8", expert_imbalance=uneven, margin=0.0)
        return compile_graph("dr_grpo", settings, target=target)

    even, uneven = aimed(None, 8), aimed(1.5, 8)
    first, second = (step for plan in (even, uneven) for step in plan.steps if step.updated)
    assert first.seconds and second.seconds and first.bytes and second.bytes
    assert second.seconds[0] > 1.05 * first.seconds[0] and second.bytes > 1.2 * first.bytes
    assert uneven.peak and even.peak and uneven.peak["main"].bytes > even.peak["main"].bytes
    said = "the busiest device that divides experts has"
    assert f"{said} as many tokens as the others (--expert-imbalance)" in plan_text(even)
    assert f"{said} 1.5 x the mean of those (--expert-imbalance)" in plan_text(uneven)
    assert uneven.origin and parse(uneven.json(), "plan.json").origin == uneven.origin
    # whoever has all experts has all of their tokens
    alone = [replace(plan, origin=None).json() for plan in (aimed(None, 1), aimed(1.5, 1))]
    assert alone[0] == alone[1] and said not in alone[0]


def test_the_experts_that_a_token_chooses_are_counted() -> None:
    assert size_of(MIXTURE).chosen == LAYERS * CHOSEN * 3 * HIDDEN * INNER and size_of(DENSE).chosen == 0


@pytest.mark.slow
def test_a_search_divides_experts_where_that_is_faster() -> None:
    found, compilation = autoplace(
        PlanRequest("dr_grpo", [f"models.policy.path={MIXTURE}"], target=Target("h100-8", margin=0.0))
    )
    best = compilation.plan
    assert found[0].layout
    tried = {
        one.layout.divided: goals.fit(one) for one in reversed(found) if one.layout
    }  # each with its best
    sizes = [None, *(("expert_parallel", ranks) for ranks in (2, 4, 8))][: len(tried)]
    assert {*tried} == {*sizes} and goals.fit(found[0]) == min(tried.values())
    gains = [tried[larger] < min(tried[size] for size in sizes[:at]) for at, larger in enumerate(sizes) if at]
    # the search ends where a doubling is no gain, with recomputing and without: here both do
    assert gains and (len(sizes) == 4 or not gains[-1])
    _, ranks = found[0].layout.divided or ("", 1)
    assert best.meshes["policy"].experts == ranks
    others = "all of a layer on each device" if ranks > 1 else r"experts over \d devices"
    assert re.search(rf"the same with {others}: (\d.\d\d x the time|main needs)", contest_text(found))
    layout = PoolLayout(0, frozenset(), 8, 2048, True)
    again = {one.divided for one in divisions(planned(2), layout, "expert_parallel", 8)}
    assert again == {("expert_parallel", ranks) for ranks in (1, 2, 4, 8)}


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_refused_with_experts_that_are_divided() -> None:
    given = ["models.policy.path=Qwen/Qwen3-235B-A22B", "models.policy.serve.tensor_parallel=8"]
    given += [
        "models.policy.train.optimizer_offload=true",
        "models.policy.train.recompute=true",
        "rollout.max_new_tokens=30000",
    ]
    with pytest.raises(GraphError, match="does not fit") as refused:
        compile_graph("dr_grpo", usual(given), target=Target("h100-64", margin=0.0))
    remedy = "models.policy.train.expert_parallel=8"
    assert f"{remedy}  # " in refused.value.problems[0].remedy
    assert "train.tensor_parallel" not in refused.value.problems[0].remedy
    plan = compile_graph("dr_grpo", [*given, remedy], target=Target("h100-64", margin=0.0))
    assert all(peak.fits for peak in (plan.peak or {}).values())
    with pytest.raises(GraphError, match="does not fit") as refused:
        compile_graph("dr_grpo", usual([*given, "models.policy.train.shard=4"]), target=Target("h100-64"))
    # copies of 4 devices are no groups of 8
    for line in refused.value.problems[0].remedy.splitlines():
        assert remedy not in line or "models.policy.train.shard=null" in line
