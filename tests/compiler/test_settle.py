"""What a graph leaves open as ``auto``: settled by the devices, then by what they hold; other values stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.autoplace import autoplace
from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster, local_device, of_gpus
from rlgraph.costs.hardware import Cluster
from rlgraph.costs.memory import Footprint
from rlgraph.costs.model_size import size_of
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.engines.serve_settings import SglangSettings
from rlgraph.errors import GraphError, RunError
from rlgraph.frontend.bind_model import on_device
from rlgraph.frontend.compose import compose
from rlgraph.ir.actions import Kind, MoveEngine
from rlgraph.ir.plan import Plan, Target
from rlgraph.lowering import plan_tree
from rlgraph.planning.auto_settings import PAGE, as_planned
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.plan_file import compile_again, parse
from rlgraph.request import PlanRequest
from rlgraph.syntax.model_settings import SERVE_AUTO, TRAIN_AUTO, ModelSection, Serve, Train
from usual_settings import usual

EIGHT_B = "models.policy.path=Qwen/Qwen3-8B"
H100 = Target("h100-8")
LISTING = "".join(f"{n}, GPU-{n}{n}ab, NVIDIA H100 80GB HBM3, 81559\n" for n in range(8))


def planned(*overrides: str, graph: str = "grpo", target: Target = H100) -> Plan:
    return compile_graph(graph, overrides, target=target)


def serve(plan: Plan) -> dict[str, object]:
    found = plan.models["policy"].serve
    assert found
    return dict(found)


def train(plan: Plan, model: str = "policy") -> dict[str, object]:
    found = plan.models[model].train
    assert found
    return dict(found)


def seconds(plan: Plan) -> float:
    assert plan.predicted
    return math.sqrt(math.prod(plan.predicted.seconds))


def rollout_peak(plan: Plan, target: Target = H100) -> int:
    """The most bytes that a device holds in a rollout."""
    cluster = load_cluster(target.cluster)
    tokens = target.prompt_tokens, target.response_tokens
    footprint = Footprint(plan, cluster, workload(plan, *tokens), sizes_of(plan))
    moments = footprint.moments("main", plan.steps)
    return max(parts.total() for step, parts in moments if step.node == "rollout")


# -- by the devices


@pytest.mark.parametrize(
    ("device", "engine", "dtype"), [("cuda", "sglang", "bfloat16"), ("cpu", "transformers", "float32")]
)
def test_data_types_and_engine_follow_the_devices(device: str, engine: str, dtype: str) -> None:
    model = on_device(ModelSection(path="some/model"), device)
    assert (model.serve.engine, model.serve.dtype, model.train.dtype) == (engine, dtype, dtype)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_given_stays(device: str) -> None:
    given = ModelSection(
        path="some/model",
        serve=Serve(engine="transformers", dtype="bfloat16", cache_tokens=4096),
        train=Train(dtype="float32", recompute=True),
    )
    assert on_device(given, device) == given


@pytest.mark.parametrize(
    "spec", [Serve(tensor_parallel=2), Serve(sglang=SglangSettings(addresses=["http://one:30000"]))]
)
def test_what_only_sglang_can_do_is_done_by_it_on_a_cpu_too(spec: Serve) -> None:
    assert on_device(ModelSection(path="some/model", serve=spec), "cpu").serve.engine == "sglang"


def test_a_cluster_says_what_its_devices_are() -> None:
    """A CPU may be faster in bfloat16 too: its file then says that it is one."""
    h100 = load_cluster("h100-8")
    assert h100.device == h100.model_copy(update={"kind": None}).device == "cuda"
    assert h100.model_copy(update={"kind": "cpu"}).device == load_cluster("cpu").device == "cpu"


def test_the_plan_says_what_was_settled() -> None:
    text = plan_text(planned(EIGHT_B))
    assert "held by fsdp (bfloat16, computing activations again) and sglang (bfloat16)\n" in text
    assert "model ref: frozen, head lm, held by fsdp (bfloat16)\n" in text
    assert "held by fsdp (float32) and transformers (float32)\n" in plan_text(compile_graph("grpo"))


# -- by what they hold


def test_without_a_cluster_the_values_are_fixed() -> None:
    plain, servers = (compile_graph("grpo", given) for given in ((), ["models.policy.serve.engine=sglang"]))
    assert (serve(plain)["cache_tokens"], serve(servers)["cache_tokens"]) == (524_288, 65_536)
    assert train(plain)["recompute"] is train(plain, "ref")["recompute"] is False


def test_the_usual_model_fits_a_host_of_eight_without_a_setting(golden: Callable[[str, str], None]) -> None:
    plan = planned(EIGHT_B)
    assert serve(plan)["engine"] == "sglang"
    assert serve(plan)["dtype"] == train(plan)["dtype"] == train(plan, "ref")["dtype"] == "bfloat16"
    assert plan.peak and all(peak.bytes <= peak.capacity for peak in plan.peak.values())
    golden("plan/grpo-qwen3-8b.txt", plan_text(plan))


def test_activations_are_computed_again_only_where_they_do_not_fit() -> None:
    assert train(planned())["recompute"] is False
    assert train(planned(EIGHT_B))["recompute"] is True
    assert train(planned(EIGHT_B), "ref")["recompute"] is False, "it has no backward pass"
    assert train(planned(EIGHT_B, "models.policy.train.micro_tokens=2048"))["recompute"] is False
    with pytest.raises(GraphError, match=r"does not fit(.|\n)*recompute=true"):
        planned(*usual([EIGHT_B, "models.policy.train.recompute=false"]))


LONG = (EIGHT_B, "rollout.max_new_tokens=16384")


def test_the_cache_takes_what_is_free_while_it_generates() -> None:
    plan = planned(*LONG)
    tokens = int(str(serve(plan)["cache_tokens"]))
    page = PAGE * size_of("Qwen/Qwen3-8B").kv_bytes(2)
    capacity = load_cluster("h100-8").usable
    assert capacity - 2 * page < rollout_peak(plan) <= capacity
    assert tokens > 65_536 and seconds(plan) < seconds(
        planned(*LONG, "models.policy.serve.cache_tokens=65536")
    )


def test_a_cache_is_no_larger_than_its_samples() -> None:
    plan = planned()
    work = workload(plan)
    assert serve(plan)["cache_tokens"] == work.rows["samples"] / 8 * work.most


def test_states_leave_for_a_larger_cache_where_that_is_faster() -> None:
    """One host trains 14B: what the optimizer takes on it is room for samples, a third of an iteration."""
    long = ("models.policy.path=Qwen/Qwen2.5-14B", "rollout.max_new_tokens=16384")
    plan = planned(*long)
    moves = [step.action for step in plan.steps if isinstance(step.action, MoveEngine)]
    moved = {part for move in moves if move.kind is Kind.OFFLOAD for part in move.parts}
    assert moved == {"parameters", "optimizer"}
    assert plan.predicted and plan.predicted.in_flight["rollout"][1] > 1
    for tokens in (65_536, 98_304, 131_072):
        assert seconds(plan) < seconds(planned(*long, f"models.policy.serve.cache_tokens={tokens}"))


def test_the_plan_counts_the_whole_cache_of_a_server() -> None:
    """SGLang allocates it at once, however few samples there are."""
    plan = planned(EIGHT_B, "models.policy.serve.cache_tokens=200000", "prompts.batch=8")
    assert plan.peak
    held = [peak.parts["kv cache"] for peak in plan.peak.values()]
    assert held == [200_000 * size_of("Qwen/Qwen3-8B").kv_bytes(2)]


@pytest.mark.parametrize(("group", "parts"), [(2, 2), (4, 4), (8, 4)])
def test_a_group_shares_the_heads_of_the_keys(group: int, parts: int) -> None:
    """Qwen2.5-7B has four: on eight devices each is held twice."""
    given = ("models.policy.path=Qwen/Qwen2.5-7B", f"models.policy.serve.tensor_parallel={group}")
    plan = planned(*given, "models.policy.serve.cache_tokens=100000")
    footprint = Footprint(plan, load_cluster("h100-8"), workload(plan), sizes_of(plan))
    kv = next(size for item, size in footprint.items("main").items() if item.name == "kv")
    assert kv == 100_000 * size_of("Qwen/Qwen2.5-7B").kv_bytes(2) / parts


def test_pages_go_to_the_mean_and_slots_to_the_longest() -> None:
    for engine in ("sglang", "transformers"):
        plan = planned("models.policy.serve.cache_tokens=16384", f"models.policy.serve.engine={engine}")
        footprint = Footprint(plan, load_cluster("h100-8"), work := workload(plan), sizes_of(plan))
        step = next(step for step in plan.steps if step.node == "rollout")
        assert footprint.slots(step) == 16384 // (work.mean if engine == "sglang" else work.most)


def test_samples_in_flight_are_said() -> None:
    plan = planned("models.policy.serve.cache_tokens=16384")
    assert "caches  16,384 tokens: 21 samples in flight per engine, 7 waves\n" in plan_text(plan)
    assert plan.predicted and plan.predicted.in_flight == {"rollout": (21, 7)}  # 16384 / 768; 128 / 21


@pytest.mark.parametrize(
    "micro", [(16384,), pytest.param(None, marks=pytest.mark.nightly)], ids=["few", "all"]
)
def test_a_search_over_layouts_fills_each(
    micro: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if micro:
        monkeypatch.setattr("rlgraph.search.layout_search.MICRO", micro)
        monkeypatch.setattr("rlgraph.search.layout_search.COARSE", 4)
    found, compilation = autoplace(PlanRequest("grpo", LONG, target=H100))
    best = compilation.plan
    caches = {serve(one.plan)["cache_tokens"] for one in found if one.plan and one.fits}
    assert len(caches) >= 4 and 65_536 not in caches
    assert seconds(best) <= seconds(planned(*LONG))


# -- GPUs at hand


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight H100."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("rlgraph.costs.detect._gpu_files", lambda: 8)
    monkeypatch.setattr("rlgraph.costs.detect._nvidia_smi", lambda: LISTING)
    monkeypatch.setattr("rlgraph.costs.detect.memory", lambda: 2e12)


@pytest.mark.usefixtures("gpus")
def test_on_gpus_memory_is_planned_without_an_option() -> None:
    said = CliRunner().invoke(main, ["plan", "grpo", EIGHT_B, "--format", "json"])
    plan = parse(said.output)
    assert plan.device == "cuda" and plan.peak and plan.origin and plan.origin.target == Target("auto")
    given = CliRunner().invoke(main, ["plan", "grpo", EIGHT_B, "--format", "json", "--cluster", "auto"])
    assert said.output == given.output


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("devices", "hosts"), [(2, 1), (8, 1), (16, 2)])
def test_more_gpus_are_as_those_of_this_machine(devices: int, hosts: int) -> None:
    plan = compile_graph("grpo", devices=devices, device="cuda")
    same = of_gpus(LISTING, 2e12).model_copy(update={"hosts": hosts})
    assert plan.pools == {"main": devices} and plan.predicted
    assert plan.peak == on_other(plan, same).peaks()


def on_other(plan: Plan, cluster: Cluster) -> Footprint:
    return Footprint(plan, cluster, workload(plan), sizes_of(plan))


@pytest.mark.usefixtures("gpus")
def test_a_model_of_unknown_size_runs_without_a_plan_of_its_memory() -> None:
    plan = compile_graph("grpo", ["models.policy.path=someone/something"], 8, device="cuda")
    assert plan.peak is None and train(plan)["dtype"] == "bfloat16"
    assert serve(plan)["cache_tokens"] == 65_536
    assert any("memory is not planned" in note and "someone/something" in note for note in plan.notes)


@pytest.mark.usefixtures("gpus")
def test_so_does_a_family_of_unknown_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    plan = compile_graph("grpo", [f"models.policy.path={tmp_path}"], 8, device="cuda")
    assert plan.peak is None
    assert any("rwkv: sizes of models of this type are not known" in note for note in plan.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_what_does_not_fit_is_refused_there() -> None:
    with pytest.raises(GraphError, match="does not fit on auto-8xH100"):
        compile_graph("grpo", usual(["models.policy.path=Qwen/Qwen2.5-72B"]), 8, device="cuda")


def test_gpus_of_others_are_planned_for_without_their_memory() -> None:
    """A driver may have none of the GPUs that its cluster has."""
    plan = compile_graph("grpo", (), 8, device="cuda")
    assert plan.device == "cuda" and serve(plan)["engine"] == "sglang" and plan.peak is None
    assert any("this machine has no GPUs" in note for note in plan.notes)


@pytest.mark.usefixtures("gpus")
def test_on_gpus_without_sglang_engines_are_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.compiler.is_installed", lambda name: False)
    plan = compile_graph("grpo", [EIGHT_B], device="cuda")
    assert serve(plan)["engine"] == "transformers" and serve(plan)["dtype"] == "bfloat16"
    tree = as_planned(compose("grpo", [EIGHT_B]), plan)
    assert plan_tree(tree, 8, "cuda").digest == plan.digest  # so that a report can plan it again
    assert serve(compile_graph("grpo", [EIGHT_B], target=Target("auto")))["engine"] == "transformers"
    # what only servers can do, and other clusters, ask for them
    spanning = [EIGHT_B, "models.policy.serve.tensor_parallel=2"]
    assert serve(compile_graph("grpo", spanning, device="cuda"))["engine"] == "sglang"
    assert serve(compile_graph("grpo", [EIGHT_B], target=H100))["engine"] == "sglang"


@pytest.mark.usefixtures("gpus")
def test_a_plan_saved_on_gpus_without_sglang_is_that_of_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlgraph.compiler.is_installed", lambda name: False)
    path, plan = tmp_path / "plan.json", compile_graph("grpo", [EIGHT_B], device="cuda")
    path.write_text(plan.json())
    assert compile_again(path).plan == plan


@pytest.mark.usefixtures("gpus")
def test_hidden_gpus_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_device() == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert local_device() == "cpu"


# -- what a plan says of its caches

JUDGED = """extends: dapo
edits:
  - set: {prompts.tokenizer: policy}
  - add: {models.judge: {path: Qwen/Qwen3-8B, frozen: true}}
  - replace: {rewards: {op: reward.judge, model: judge}}
"""


def test_models_that_generate_in_one_region_share_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "judged.yaml").write_text(JUDGED)
    plan = planned(EIGHT_B, graph=str(tmp_path / "judged.yaml"))
    caches = [model.serve.cache_tokens for model in plan.models.values() if model.serve]
    assert len(caches) == 2 and min(caches) > 32 * workload(plan).most
    assert plan.predicted and all(waves < 8 for _, waves in plan.predicted.in_flight.values())


def test_a_cache_that_holds_no_sample_is_refused() -> None:
    with pytest.raises(GraphError, match=r"100 tokens hold no sample of 1,536.*\n.*1,536, or auto"):
        planned(EIGHT_B, "models.policy.serve.cache_tokens=100")


def test_samples_in_flight_are_said_of_training_and_of_own_servers_alone() -> None:
    plan = planned("models.policy.path=Qwen/Qwen3-0.6B", graph="demo")
    assert plan_text(plan).count("in flight per engine") == 1
    assert any(step.node == "rollout" for step in plan.eval_steps)
    there = planned(EIGHT_B, "models.policy.serve.sglang.addresses=[http://one:30000]")
    assert "in flight per engine" not in plan_text(there)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ([EIGHT_B, "models.policy.serve.cache_tokens=600000"], "models.policy.serve.cache_tokens=300000"),
        (["models.policy.path=Qwen/Qwen3-30B-A3B"], "models.policy.serve.tensor_parallel="),
    ],
)
def test_smaller_caches_and_servers_over_more_devices_are_remedies(settings: list[str], remedy: str) -> None:
    with pytest.raises(GraphError) as refused:
        planned(*usual(settings))
    assert remedy in refused.value.problems[0].remedy


# -- a plan of one kind of devices and a machine with the other


def test_a_plan_saved_on_gpus_is_refused_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "plan.json"
    with monkeypatch.context():
        request.getfixturevalue("gpus")
        path.write_text(compile_graph("grpo", device="cuda").json())
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        RunError, match="made for the cuda devices of the machine that planned it; those of this one are cpu"
    ):
        compile_again(path)


def test_the_devices_are_part_of_what_decides_a_run() -> None:
    assert planned().digest != compile_graph("grpo").digest
    assert planned().digest == compile_graph("grpo", target=Target("h200-8")).digest
    assert compile_graph("demo").digest == compile_graph("demo", ["schedule.save_every=9"], 2).digest


@pytest.mark.parametrize(("name", "settings"), [("serve", SERVE_AUTO), ("train", TRAIN_AUTO)])
def test_a_setting_that_is_auto_is_as_one_that_is_left_out(name: str, settings: frozenset[str]) -> None:
    plain = compile_graph("grpo", devices=1)
    assert "dtype" in settings and "pool" not in settings, "a pool may have this name"
    for setting in settings:
        plan = compile_graph("grpo", [f"models.policy.{name}.{setting}=auto"], 1)
        assert plan.models == plain.models, setting
        assert plan.digest == plain.digest, f"a run may go on with {setting}=auto or without"
    other = compile_graph("grpo", [f"models.policy.{name}.dtype=bfloat16"], 1)
    assert other.digest != plain.digest
