"""``train.tensor_parallel`` in plans: what is refused, and what it costs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlgraph.autoplace import autoplace
from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import ASSUMED, BEST, WORST, Rates
from rlgraph.costs.formulas import reduction_bytes, reduction_seconds, sync_bound, sync_bytes
from rlgraph.costs.layer_memory import staging
from rlgraph.costs.memory import EngineComponent, Footprint
from rlgraph.costs.model_size import size_of
from rlgraph.costs.plan_size import part_of
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.ir.mesh import Mesh
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.planning.model_limits import dividing
from rlgraph.printing.plan_diff import differences
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.plan_file import parse
from rlgraph.request import PlanRequest
from rlgraph.search import goals
from rlgraph.search.layout import PoolLayout
from rlgraph.search.layout_search import divisions
from rlgraph.search.text import contest_text
from usual_settings import usual

EIGHT = "Qwen/Qwen3-8B"
CLUSTER = load_cluster("h100-8")


def planned(ranks: int, *more: str, path: str = EIGHT, devices: int = 8, cluster: str = "") -> Plan:
    settings = [f"models.{name}.path={path}" for name in ("policy", "ref")]
    settings += [f"models.{name}.train.tensor_parallel={ranks}" for name in ("policy", "ref")]
    return compile_graph("grpo", [*settings, *more], devices, Target(cluster) if cluster else None)


def step_of(plan: Plan, node: str) -> Step:
    (step,) = [step for step in plan.steps if step.node == node]
    return step


def test_the_plan_shows_the_mesh() -> None:
    one, two = planned(1), planned(2)
    assert two.meshes["policy"] == Mesh(1, 4, 2)
    assert "held by fsdp (float32, 4-way shard x 2-way tensor)" in plan_text(two)
    assert "tensor" not in plan_text(one)
    assert differences(one, two) == [f"model {n}: train.tensor_parallel: 1 -> 2" for n in ("policy", "ref")]
    assert parse(two.json(), "plan.json").meshes["ref"] == Mesh(1, 4, 2)


def test_a_run_may_go_on_with_whole_layers() -> None:
    assert planned(2).digest == planned(1).digest


def test_a_pool_that_does_not_divide_is_refused() -> None:
    with pytest.raises(GraphError, match=r"(?s)pool `main` has 6 devices.*groups of 4 .*multiple of 4") as e:
        planned(4, devices=6)
    assert {problem.kind for problem in e.value.problems} == {"tensor-parallel"}


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("sequence_parallel=2", "sequence_parallel"),
        ("shard=2", "shard"),
        ("lora={rank: 4}", "lora"),
        ("compile=true", "compile"),
    ],
)
def test_what_it_excludes_is_refused_with_its_place(tmp_path: Path, setting: str, name: str) -> None:
    path = tmp_path / "divided.yaml"
    text = f"graph: divided\nextends: grpo\nedits:\n  - set: {{models.policy.path: {EIGHT}}}\n"
    path.write_text(text + "  - set: {models.policy.train.tensor_parallel: 2}\n")
    with pytest.raises(GraphError) as caught:
        compile_graph(str(path), [f"models.policy.train.{setting}"], 8)
    said = str(caught.value)
    assert f"{path}:5:" in said
    assert f"(models.policy.train.tensor_parallel), which can't be combined with {name}" in said
    assert f"leave out models.policy.train.{name}, or set tensor_parallel to 1" in said


@pytest.mark.parametrize(
    ("fields", "ranks", "law", "accepted"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 4, "the 6 query heads", ("1", "3")),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, "the 2 key heads", ("1", "2")),
        ({"num_attention_heads": 8, "intermediate_size": 26}, 4, "the 26 columns of the MLP", ("1", "2")),
    ],
)
def test_layers_that_do_not_divide_are_refused_with_what_works(
    tmp_path: Path, fields: dict[str, int], ranks: int, law: str, accepted: tuple[str, ...]
) -> None:
    shape = {"num_hidden_layers": 1, "vocab_size": 9, "hidden_size": 24, "intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape, **fields}))
    with pytest.raises(
        GraphError, match=rf"{law} of `policy` can't be shared out among {ranks} devices"
    ) as e:
        planned(ranks, path=str(tmp_path), devices=12)
    assert e.value.problems[0].accepted == accepted


@pytest.mark.parametrize("path", ["microsoft/phi-4", "allenai/OLMo-2-0425-1B", "zai-org/GLM-4-9B-0414"])
def test_a_family_that_cannot_be_divided_is_refused_by_name(path: str) -> None:
    family = size_of(path).config.model_type
    law = f"`policy` is a {family}: its .*, so that its layers can't be divided among devices"
    with pytest.raises(GraphError, match=law) as error:
        planned(2, path=path)
    assert error.value.problems[0].accepted == ("1",)


def test_a_mixture_is_refused_and_a_model_of_unknown_size_left_to_the_engine() -> None:
    with pytest.raises(GraphError, match="`policy` is a mixture of experts"):
        planned(2, path="Qwen/Qwen3-30B-A3B")
    assert planned(3, path="somebody/elses", devices=12).models["policy"].train


def test_a_part_has_its_heads_and_its_share_of_the_width() -> None:
    whole, part = size_of(EIGHT), part_of(size_of(EIGHT), 4)
    assert (part.config.queries, part.config.keys) == (whole.config.queries // 4, whole.config.keys // 4)
    norms = 2 * 4096 + 2 * 128
    assert 4 * (part.layers[0] - norms) == whole.layers[0] - norms
    assert part.root_tensors == whole.root_tensors and part.attention_flops(9) == whole.attention_flops(9) / 4


def test_a_device_holds_shards_of_its_part() -> None:
    plan = planned(2, cluster="h100-8")
    held = Footprint(plan, CLUSTER, workload(plan), sizes_of(plan)).items("main")
    part = part_of(size_of(EIGHT), 2)
    assert held[EngineComponent("policy", "train", "parameters")] == 4 * part.on_device(4)
    assert held[EngineComponent("policy", "train", "optimizer")] == 8 * part.on_device(4)
    assert held[EngineComponent("ref", "train", "parameters")] == 2 * part.on_device(4)


def test_sums_of_hidden_states_are_counted() -> None:
    size, rates = size_of(EIGHT), {n: Rates(CLUSTER, n, "bfloat16", WORST) for n in (1, 4)}
    each = 2 * 3 / 4 * 1000 * 4096 * 2  # a ring: all but a part come twice
    assert reduction_bytes(size, rates[4], 1000, 1) == 36 * 2 * each  # behind attention and MLP
    assert reduction_bytes(size, rates[4], 1000, 3) == 36 * 4 * each  # and in the backward pass before them
    assert reduction_bytes(size, rates[4], 1000, 4) == 36 * 5 * each  # again, but for the last of a layer
    assert reduction_bytes(size, rates[1], 1000, 4) == reduction_seconds(size, rates[1], 1000, 4, 7) == 0
    seconds = 36 * 4 * (each / (CLUSTER.intra_link * ASSUMED.link[WORST]) + 7 * ASSUMED.reduction[WORST])
    assert reduction_seconds(size, rates[4], 1000, 3, 7) == pytest.approx(seconds)


def test_shards_of_a_part_are_gathered_from_as_far_as_they_lie() -> None:
    hosts = CLUSTER.model_copy(update={"hosts": 2})
    near = Rates(hosts, 8, "bfloat16", BEST)
    assert near.travel(1.0) < replace(near, tensor=2).travel(1.0)
    assert near.travel(1.0) == replace(near, devices=4, tensor=2).travel(1.0)


def test_a_sync_gathers_a_part_and_then_the_others() -> None:
    size, part = size_of(EIGHT), part_of(size_of(EIGHT), 2)
    expected = 2 * (3 * part.on_device(4) + size.parameters - part.parameters)
    sync = next(step for step in planned(2, cluster="h100-8").steps if step.kind == "sync")
    assert sync.bytes == sync_bytes(size, 4, 2, 2) == expected
    assert sync_bytes(size, 4, 2) == sync_bytes(size, 4, 2, 1) == 2 * 3 * size.on_device(4)
    assert sync_bound(size, 4, 2, tensor=2) <= sync.bytes
    # an embedding as it is gathered, and then buckets: gathered, laid out, gathered again and joined
    assert staging(((8, 10), (4, 10), (4, 10)), 2, 2, 160, parts=2) == 2 * (80 + 2 * 80 + 80)


def test_activations_are_divided_too() -> None:
    long = ["rollout.max_new_tokens=60000", "prompts.batch=8"]
    kept = [*long, *(f"models.{name}.train.recompute=false" for name in ("policy", "ref"))]
    peaks = []
    for ranks in (1, 8):
        plan = planned(ranks, *kept)
        (update,) = [step for step in plan.steps if step.updated]
        passing = Footprint(plan, CLUSTER, workload(plan), sizes_of(plan)).passing(update)
        peaks.append(max(parts["activations"] for parts in passing.values()))
    assert 2 < peaks[0] / peaks[1] < 8  # hidden states are whole on each


def test_steps_show_what_they_take() -> None:
    one, two = planned(1, cluster="h100-8"), planned(2, cluster="h100-8")
    for node in ("old_logprobs", "ref_logprobs", "update_policy"):
        plain, divided = step_of(one, node), step_of(two, node)
        assert plain.bytes and divided.bytes and divided.bytes != plain.bytes
        assert divided.seconds and divided.seconds[0] > 0


def test_what_it_excludes_is_not_proposed() -> None:
    long = ["rollout.max_new_tokens=64000", "models.policy.train.optimizer_offload=true"]
    long += ["models.policy.serve.tensor_parallel=8", "models.policy.train.recompute=true"]
    with pytest.raises(GraphError, match="does not fit") as error:
        planned(
            2, *usual(long), "models.policy.train.tensor_parallel=2", path="Qwen/Qwen3-32B", cluster="h100-8"
        )
    assert "activation_offload=true" in str(error.value) and "sequence_parallel" not in str(error.value)


def test_a_search_divides_layers_of_what_can_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.search.layout_search.MICRO", (16384,))
    given = [f"models.policy.path={EIGHT}", "models.policy.serve.engine=transformers"]
    found, _ = autoplace(
        PlanRequest("dr_grpo", [*given, "rollout.max_new_tokens=30000"], target=Target("h100-8"))
    )
    tried = {one.layout.divided: one for one in reversed(found) if one.layout}
    assert {*tried} >= {None, ("tensor_parallel", 2)}
    assert goals.fit(found[0]) == min(goals.fit(one) for one in tried.values())
    for division, one in tried.items():
        if one.plan and division:
            train = one.plan.models["policy"].train
            assert train and (train.tensor_parallel, train.sequence_parallel) == (division[1], 1)
    assert re.search(
        r"the same with layers over \d devices: (\d.\d\d x the time|main needs)", contest_text(found)
    )
    start = PoolLayout(0, frozenset(), 1, 2048, True)
    again = {one.divided for one in divisions(planned(2), start, "tensor_parallel", 8)}
    assert again == {("tensor_parallel", ranks) for ranks in (1, 2, 4, 8)}
    assert not [*divisions(planned(1, path="microsoft/phi-4"), start, "tensor_parallel", 8)]
    assert dividing(planned(1, "models.policy.optimizer.kind=muon"), "tensor_parallel", 2) == ["ref"]


@pytest.mark.parametrize(("path", "divides"), [(EIGHT, True), ("microsoft/phi-4", False)])
def test_a_plan_that_does_not_fit_is_refused_with_layers_that_are_divided(path: str, divides: bool) -> None:
    given = [f"models.policy.path={path}", "rollout.max_new_tokens=100000", "prompts.batch=8"]
    given += ["models.policy.serve.tensor_parallel=8", "models.policy.train.recompute=true"]
    with pytest.raises(GraphError, match="does not fit") as refused:
        compile_graph("dr_grpo", usual(given), target=Target("h100-8"))
    remedy = "models.policy.train.tensor_parallel=2"
    assert (f"{remedy}  # " in refused.value.problems[0].remedy) == divides
    if divides:
        plan = compile_graph("dr_grpo", [*given, remedy], target=Target("h100-8"))
        assert all(peak.fits for peak in (plan.peak or {}).values())
