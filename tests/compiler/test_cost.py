"""The cost model: each formula by hand, what must grow with what, memory that adds up, and the text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlgraph.cli.main import main
from rlgraph.compiler import Compilation, compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import ASSUMED, BEST, WORST, Rates
from rlgraph.costs.formulas import (
    Tokens,
    decode_seconds,
    decode_step_seconds,
    gather_bytes,
    prefill_seconds,
    score_bytes,
    score_seconds,
    sync_bound,
    update_bytes,
    update_seconds,
)
from rlgraph.costs.hardware import Cluster
from rlgraph.costs.layer_memory import Layer, logits_bytes
from rlgraph.costs.memory import EngineComponent, Footprint
from rlgraph.costs.model_size import size_of
from rlgraph.costs.pricing import sizes_of, sync_least
from rlgraph.costs.train_memory import Pass
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.ir.plan import Plan, Target
from rlgraph.lengths import Lengths
from rlgraph.lowering import plan_tree
from rlgraph.planning.auto_settings import fixed
from rlgraph.planning.predict import DoesNotFitError, Scenario, predict
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.plan_file import compile_again, parse
from rlgraph.request import PlanRequest
from rlgraph.search.evaluate import Evaluator
from rlgraph.search.fit import with_remedies
from rlgraph.syntax.source import Tree
from usual_settings import usual

SEVEN = size_of("Qwen/Qwen2.5-7B")
N = 7_615_616_512
H100 = load_cluster("h100-8")
WIDE = ["policy", "ref"]
SEVEN_FITS = ["models.policy.path=Qwen/Qwen2.5-7B", *(f"models.{m}.train.dtype=bfloat16" for m in WIDE)]
SEVEN_FITS += [*(f"models.{m}.train.micro_tokens=4096" for m in WIDE), "models.policy.serve.dtype=bfloat16"]


def rates(devices: int = 8, grade: int = BEST, dtype: str = "bfloat16") -> Rates:
    return Rates(H100, devices, dtype, grade)


def on(name: str, graph: str = "grpo", *overrides: str, **tokens: float) -> Plan:
    cluster = load_cluster(name)
    return predict(compile_graph(graph, overrides, cluster.total), Scenario(cluster, tokens))


def refusal(*overrides: str) -> GraphError:
    """The refusal of grpo, compiled for devices of which only their number is known, with its remedies."""
    request = PlanRequest("grpo", overrides, H100.total)
    compilation, scenario = Compilation(request), Scenario(H100)

    def make_plan(tree: Tree, devices: int) -> Plan:
        return fixed(plan_tree(tree, devices))

    with pytest.raises(DoesNotFitError) as caught:
        predict(compilation.plan, scenario)
    evaluator = Evaluator(request, compilation.written, make_plan, H100.total, scenario)
    return with_remedies(caught.value, evaluator)


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def passing(tokens: float, grade: int = BEST) -> float:
    """The seconds in which activations of SEVEN's layers pass through memory in a forward pass, by hand."""
    hidden, queries, keys, inner = 3584, 3584, 512, 18944
    norms_and_sums = 2 * 5 * hidden
    attention = 2 * hidden + 2 * (queries + 2 * keys) + 2 * (queries + keys) + 2 * queries
    numbers = 28 * (norms_and_sums + attention + 2 * hidden + 6 * inner)
    times = ASSUMED.activations[grade]
    return times * 2 * numbers * tokens / (3.35e12 * ASSUMED.memory[grade])


def logits(tokens: float) -> float:
    """The same of logits, at best."""
    return 2 * 3 * 152064 * tokens / (3.35e12 * ASSUMED.memory[BEST])


def test_prefill_by_hand() -> None:
    # 4 prompts of 1,000 tokens: 2 N each, N without embedding and head; attention 2 s^2 heads head_dim
    # layers; the head for the last token
    head = 152064 * 3584
    work = 4 * (2 * (N - 2 * head - 3584) * 1000 + 2 * 1000**2 * 3584 * 28 + 2 * head)
    expected = work / (989e12 * ASSUMED.prefill[BEST]) + passing(4000)
    assert prefill_seconds(SEVEN, rates(), 4, 1000) == pytest.approx(expected, rel=1e-6)


def test_a_decode_step_reads_weights_and_cache() -> None:
    live, context = 8, 2048
    read = 2 * SEVEN.multiplied + live * context * 56 * 2**10
    reading = read / (3.35e12 * ASSUMED.memory[BEST])
    gaps = 28 * ASSUMED.graph_layer[BEST] + ASSUMED.graph_step[BEST] + live * ASSUMED.decode_row[BEST]
    assert decode_step_seconds(SEVEN, rates(), live, context, graphs=True) == pytest.approx(reading + gaps)


def test_kernels_are_launched_while_others_run() -> None:
    live, context = 8, 2048
    beside = ASSUMED.decode_step[BEST] + live * ASSUMED.decode_row[BEST]
    launching = 28 * ASSUMED.decode_layer[BEST]
    assert decode_step_seconds(SEVEN, rates(), live, context) == pytest.approx(launching + beside)
    # with so much to read that a device is busy for longer, launching takes no time of its own
    reading = (2 * SEVEN.multiplied + 512 * 2048 * 56 * 2**10) / (3.35e12 * ASSUMED.memory[BEST])
    many = ASSUMED.decode_step[BEST] + 512 * ASSUMED.decode_row[BEST]
    assert reading > launching
    assert decode_step_seconds(SEVEN, rates(), 512, 2048) == pytest.approx(reading + many)


def test_a_decode_step_of_many_short_rows_computes() -> None:
    work = 4096 * 2 * (SEVEN.multiplied + 2 * 64 * 3584 * 28)
    gaps = 28 * ASSUMED.graph_layer[BEST] + ASSUMED.graph_step[BEST] + 4096 * ASSUMED.decode_row[BEST]
    expected = work / (989e12 * ASSUMED.decode[BEST]) + gaps
    assert decode_step_seconds(SEVEN, rates(), 4096, 64, graphs=True) == pytest.approx(expected)


def test_a_gpu_of_few_flops_computes_a_whole_tile_for_one_row() -> None:
    h20 = Rates(load_cluster("h20-8"), 1, "bfloat16", BEST)
    tile = 2 * 64 * SEVEN.multiplied / (148e12 * ASSUMED.decode[BEST])
    reading = 2 * SEVEN.multiplied / (4e12 * ASSUMED.memory[BEST])
    assert tile > reading
    one, rows = (decode_step_seconds(SEVEN, h20, live, 1, graphs=True) for live in (1, 64))
    assert one > tile
    assert rows - one == pytest.approx(63 * ASSUMED.decode_row[BEST], rel=0.01)


def test_a_cpu_has_no_tiles() -> None:
    cpu = Rates(load_cluster("cpu"), 1, "float32", BEST)
    assert cpu.tiles() == (1, 1)


def test_each_expert_that_a_row_chose_has_a_tile_of_its_own() -> None:
    mixture = size_of("Qwen/Qwen3-30B-A3B")
    experts = 48 * 128 * 3 * 768 * 2048
    dense = mixture.multiplied - experts / 16  # 8 of 128 are chosen
    assert mixture.tiled(1, 64, 64) == pytest.approx(64 * dense + 16 * experts / 16)
    # 1,000 rows choose all experts, 62.5 rows each, of which half a tile more is computed
    assert mixture.tiled(1000, 64, 64) == pytest.approx(1000 * dense + (62.5 + 32) * experts)


def test_a_layer_of_experts_launches_more_kernels() -> None:
    assert SEVEN.launched_layers == 28
    assert size_of("Qwen/Qwen3-30B-A3B").launched_layers == 1.5 * 48


@pytest.mark.parametrize("option", ["disable_cuda_graph: true", "cuda_graph_backend_decode: disabled"])
def test_servers_without_cuda_graphs_launch_each_kernel(option: str) -> None:
    seconds = []
    for options in ("{}", f"{{{option}}}"):
        settings = [*SEVEN_FITS, f"models.policy.serve.sglang.options={options}"]
        plan = compile_graph("grpo", settings, target=Target("h100-8"))
        (rollout,) = (step for step in plan.steps if step.node == "rollout")
        assert rollout.seconds
        seconds.append(rollout.seconds[0])
    assert seconds[1] > 1.5 * seconds[0]


def test_the_longest_sample_sets_the_phase() -> None:
    lengths = Lengths(mean=500, longest=8000)
    few, many = (decode_seconds(SEVEN, rates(), rows, 1024, 100, lengths) for rows in (1, 64))
    step = decode_step_seconds(SEVEN, rates(), 1, 100)
    assert many > lengths.of_longest(64) * step > 3 * few / 2
    assert lengths.of_longest(64) == pytest.approx(500 * math.log(64), rel=0.02)


def test_rows_without_a_slot_wait() -> None:
    lengths = Lengths(500, 1000)
    one, two = (decode_seconds(SEVEN, rates(), rows, 32, 100, lengths) for rows in (32, 64))
    full = decode_step_seconds(SEVEN, rates(), 32, 100 + 250)
    assert two - one == pytest.approx(500 * full)


def test_a_log_prob_pass_by_hand() -> None:
    work = Tokens(tokens=1e6, squares=1e9, passes=1)
    flops = 2 * SEVEN.multiplied * 1e6 + 2 * 1e9 * 3584 * 28
    expected = flops / (989e12 * ASSUMED.score[BEST]) + passing(1e6) + logits(1e6)
    assert score_seconds(SEVEN, rates(1), work) == pytest.approx(expected)


def test_an_update_by_hand() -> None:
    work = Tokens(tokens=1e6, squares=1e9, passes=1)
    flops = 6 * SEVEN.multiplied * 1e6 + 6 * 1e9 * 3584 * 28
    optimizer = 2 * 28 * N / (3.35e12 * ASSUMED.memory[BEST])
    memory = 3 * (passing(1e6) + logits(1e6))
    expected = flops / (989e12 * ASSUMED.update[BEST]) + memory + optimizer
    assert update_seconds(SEVEN, rates(1), work, optimizer_steps=2) == pytest.approx(expected)
    assert update_seconds(SEVEN, rates(1), work, 2, factor=4) - optimizer == pytest.approx(
        4 / 3 * (expected - optimizer)
    )


@pytest.mark.parametrize("grade", [BEST, WORST])
def test_an_update_takes_as_many_log_prob_passes_as_was_measured(grade: int) -> None:
    work = Tokens(tokens=1e6, squares=0, passes=1)
    update = update_seconds(
        SEVEN, rates(1, grade), work, 0, factor=4
    )  # those runs computed activations again
    ratio = update / score_seconds(SEVEN, rates(1, grade), work)
    assert 1.9 <= ratio <= 3.3


def test_communication_hides_at_best_and_adds_in_part_at_worst() -> None:
    work = Tokens(tokens=1e6, squares=0, passes=10)
    for grade in (BEST, WORST):
        compute = score_seconds(SEVEN, rates(1, grade), work)
        travel = 10 * 2 * N * 7 / 8 / (450e9 * ASSUMED.link[grade])
        expected = max(compute, travel) + ASSUMED.exposed[grade] * min(compute, travel)
        assert score_seconds(SEVEN, rates(8, grade), work) == pytest.approx(expected)


def test_bytes_by_hand() -> None:
    assert score_bytes(SEVEN, rates(), passes=3) == pytest.approx(3 * 2 * N * 7 / 8)
    # a gather for forward, one of the layers for backward, gradients in float32
    ends = 2 * 152064 * 3584 + 3584
    gathered = 3 * (8 * N - 2 * ends) * 7 / 8
    assert update_bytes(SEVEN, rates(), passes=3, optimizer_steps=2) == pytest.approx(gathered)
    assert gather_bytes(SEVEN, 8) == pytest.approx(4 * N * 7 / 8)
    # the facts page: one all-gather of 7.6B in bfloat16 moves 13.3 GB
    assert sync_bound(SEVEN, 8, 2) == pytest.approx(13.3e9, abs=0.05e9)
    assert gather_bytes(SEVEN, 1) == score_bytes(SEVEN, rates(1), 3) == 0


def test_training_holds_16_bytes_a_parameter() -> None:
    plan = compile_graph("grpo", SEVEN_FITS, 8)
    footprint = Footprint(plan, H100, workload(plan), sizes_of(plan))
    held = footprint.items("main")
    policy = {
        item.name: size for item, size in held.items() if (item.model, item.engine) == ("policy", "train")
    }
    gradients = Pass(SEVEN, plan.models["policy"], devices=8, tokens=1).update()["head"]["gradients"]
    assert sum(policy.values()) + gradients == pytest.approx(16 * N / 8)
    # the facts page: optimizer offload for 7.6B on 8 GPUs is 11.4 GB: averages and masters
    assert sum(policy.values()) == pytest.approx(11.4e9, rel=3e-3)
    assert held[EngineComponent("ref", "train", "parameters")] == pytest.approx(2 * N / 8)


def test_logits_are_held_a_chunk_at_a_time() -> None:
    # the facts page: 16k tokens x 152k vocabulary in float32 are 10 GB; here there is one chunk of them
    chunk, hidden = 2**26 // 152064 * 152064, 16384 * 3584 * 4
    assert logits_bytes(SEVEN, 4, 16384, entropy=False) == 4 * chunk + hidden < 1e9
    assert logits_bytes(SEVEN, 4, 16384, entropy=True) == 8 * chunk + hidden < 2e9


def test_activations_by_hand() -> None:
    # 4 h, queries and output, keys and values, 4 of the MLP in bfloat16; two norms' inputs in float32
    assert Layer(SEVEN, 2).kept == 2 * (4 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18944) + 4 * 2 * 3584


@pytest.mark.parametrize(
    ("kind", "dtype", "masked"),
    [("cuda", "bfloat16", False), ("cuda", "float32", True), ("cpu", "bfloat16", True)],
)
def test_packed_rows_take_a_mask_only_where_they_need_one(kind: str, dtype: str, masked: bool) -> None:
    def activations(packing: str) -> int:
        train = {"packing": packing, "dtype": dtype, "recompute": "true"}
        overrides = [f"models.policy.train.{key}={value}" for key, value in train.items()]
        plan = compile_graph("grpo", [*SEVEN_FITS, *overrides], 8)
        footprint = Footprint(plan, H100.model_copy(update={"kind": kind}), workload(plan), sizes_of(plan))
        (step,) = (step for step in plan.steps if step.updated == "policy")
        return footprint.passing(step)["layer"]["activations"]

    packed, beside = activations("true"), activations("false")
    assert packed > beside if masked else packed == beside


@pytest.mark.parametrize("graph", ["grpo", "ppo"])
@pytest.mark.parametrize("name", ["h100-8", "h200-8", "h100-64", "h100-1024"])
def test_every_step_is_priced_and_parts_sum_to_the_peak(name: str, graph: str) -> None:
    plan = on(name, graph)
    assert plan.predicted and plan.peak
    for step in plan.steps:
        assert step.seconds and 0 < step.seconds[0] <= step.seconds[1]
        assert step.bytes is not None and step.bytes >= 0
    for end in (0, 1):
        took = [(step.on_host, step.seconds[end]) for step in plan.steps if step.seconds]
        hidden = sum(seconds for beside, seconds in took if not beside)  # all of what runs beside the devices
        assert hidden * (1 - 1e-6) <= plan.predicted.seconds[end] <= sum(one for _, one in took) * (1 + 1e-6)
    for peak in plan.peak.values():
        assert sum(peak.parts.values()) == peak.bytes <= peak.capacity
        assert all(isinstance(size, int) and size > 0 for size in peak.parts.values())
        assert peak.step in {step.node for step in plan.steps}


def seconds(plan: Plan, node: str) -> tuple[float, float]:
    (found,) = (step.seconds for step in plan.steps if step.node == node)
    assert found
    return found


def test_where_rows_are_few_the_longest_sets_the_update() -> None:
    few = [
        "prompts.batch=8",
        "rollout.n=4",
        "rollout.max_new_tokens=16384",
        "update_policy.minibatches=1",
        "models.policy.train.recompute=true",
    ]
    plan = on("h100-64", "grpo", *SEVEN_FITS, *few)
    work, cluster = workload(plan), load_cluster("h100-64")
    longest = work.longest(32)
    assert longest > 1.9 * work.mean
    alone = Tokens(longest, longest**2, 1)
    expected = update_seconds(SEVEN, Rates(cluster, 64, "bfloat16", BEST), alone, 1, factor=4)
    assert seconds(plan, "update_policy")[0] == pytest.approx(expected + ASSUMED.step[BEST], abs=1e-5)


@pytest.mark.parametrize("node", ["rollout", "rewards", "old_logprobs", "update_policy"])
def test_more_devices_of_a_host_are_not_slower(node: str) -> None:
    fast = H100.model_copy(update={"intra_link": 1e15, "memory": 200e9})
    times = []
    for count in (1, 2, 4, 8):
        cluster: Cluster = fast.model_copy(update={"devices": count})
        times.append(seconds(predict(compile_graph("grpo", (), count), Scenario(cluster)), node))
    for end in (0, 1):
        ordered = [time[end] for time in times]
        assert ordered == sorted(ordered, reverse=True) and ordered[0] > ordered[-1]


@pytest.mark.parametrize("node", ["rollout", "old_logprobs", "update_policy"])
@pytest.mark.parametrize("option", ["prompt_tokens", "response_tokens"])
def test_longer_texts_are_slower(node: str, option: str) -> None:
    short, long = (seconds(on("h100-8", "grpo", **{option: tokens}), node) for tokens in (64, 512))
    assert short[0] < long[0] and short[1] < long[1]


@pytest.mark.parametrize("folder", [[], ["models.policy.serve.sync_folder=/files"]])
def test_servers_at_addresses_take_no_memory_and_get_weights_from_afar(folder: list[str]) -> None:
    sglang, there = (
        "models.policy.serve.engine=sglang",
        "models.policy.serve.sglang.addresses=[http://one:30000]",
    )
    near, far = on("h100-8", "grpo", sglang), on("h100-8", "grpo", sglang, there, *folder)
    whole = size_of("Qwen/Qwen2.5-0.5B-Instruct").parameters * 4
    link = H100.host_link / 2 if folder else H100.inter_link
    for end, grade in ((0, BEST), (1, WORST)):
        longer = seconds(far, "sync:policy")[end] - seconds(near, "sync:policy")[end]
        assert longer == pytest.approx(whole / (link * ASSUMED.link[grade]), rel=1e-3)
    assert far.peak and near.peak
    assert near.peak["main"].parts.keys() - far.peak["main"].parts.keys() == {
        "serve weights",
        "kv cache",
        "server",
    }


SPLIT = (
    "pools={train: {devices: 4}, gen: {devices: 4}}",
    "models.policy.serve.pool=gen",
    "schedule.buffer={staleness: 1, by: batch}",
)
CORRECTED = "update_policy.in.old_logprobs=rollout_logprobs"


@pytest.mark.parametrize(
    ("link", "rate", "dtype", "way"),
    [
        (1e9, 1e-6, "bfloat16", "delta"),
        (1e9, 1e-6, "float32", "full"),  # float32 weights change all
        (1e9, 2e-4, "bfloat16", "full"),
        (450e9, 1e-6, "bfloat16", "full"),  # to find what has changed takes longer
    ],
)
def test_a_sync_sends_what_has_changed_where_that_is_predicted_to_pay(
    link: float, rate: float, dtype: str, way: str
) -> None:
    given = (*SPLIT, CORRECTED, f"models.policy.optimizer.lr={rate}", f"models.policy.serve.dtype={dtype}")
    scenario = Scenario(H100.model_copy(update={"intra_link": link}))
    plan = predict(plan_tree(compose("grpo", given), 8, "cuda"), scenario)
    assert plan.models["policy"].serve.sync == way
    told = [note for note in plan.notes if "sends what has changed, about 4% of its bytes" in note]
    assert len(told) == (way == "delta")
    (step,) = [step for step in plan.steps if step.node == "sync:policy"]
    for other in {"full", "delta"} - {way}:
        asked = (*given, f"models.policy.serve.sync={other}")
        whole = predict(plan_tree(compose("grpo", asked), 8, "cuda"), scenario)
        (longer,) = [step for step in whole.steps if step.node == "sync:policy"]
        assert math.prod(step.seconds) < math.prod(longer.seconds)
        if way == "delta":
            assert sync_least(plan, step.action) < 0.05 * sync_least(whole, longer.action)


def test_a_faster_device_is_not_slower() -> None:
    slow, fast = on("h100-8"), on("h200-8")
    for before, after in zip(slow.steps, fast.steps, strict=True):
        assert before.seconds and after.seconds
        assert after.seconds[0] <= before.seconds[0] and after.seconds[1] <= before.seconds[1]


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    said = str(refusal("models.policy.path=Qwen/Qwen2.5-7B"))
    assert "grpo does not fit on h100-8" in said and "in `update_policy`" in said
    assert said.index("activations") < said.index("gathered weights") < said.index("reserve")
    assert "train.recompute=true" in said
    plan = on("h100-8", "grpo", *SEVEN_FITS)
    assert plan.peak and plan.peak["main"].bytes <= 80e9


def test_every_remedy_that_is_named_fits() -> None:
    path = "models.policy.path=Qwen/Qwen2.5-1.5B"
    lines = str(refusal(path)).split("what would make it fit")[1].split("peak of")[0].splitlines()
    remedies = [line.strip().removeprefix("or ").partition("  # ")[0] for line in lines if "  # " in line]
    assert remedies
    for remedy in remedies:
        assert on("h100-8", "grpo", path, *remedy.split()).peak


def test_what_no_setting_mends_says_so() -> None:
    told = str(refusal("models.policy.path=Qwen/Qwen2.5-72B"))
    assert "no change of one pool makes it fit: --autoplace" in told


def test_a_pool_larger_than_the_cluster() -> None:
    with pytest.raises(GraphError, match=r"pool `main` has 16 devices; h100-8 has 8"):
        compile_graph("grpo", ["pools.main.devices=16"], target=Target("h100-8"))


@pytest.mark.parametrize(("graph", "name"), [("grpo", "h100-8"), ("ppo", "h100-64")])
def test_plan_for_a_cluster(graph: str, name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"plan/{graph}-{name}.txt", call("plan", graph, "--cluster", name).output)


def test_the_refusal_as_text(golden: Callable[[str, str], None]) -> None:
    seven = ("models.policy.path=Qwen/Qwen2.5-7B", "models.policy.train.recompute=false")
    result = call("plan", "grpo", *usual(seven), "--cluster", "h100-8")
    assert result.exit_code == 1
    golden("plan/does-not-fit.txt", result.output)


def test_the_plan_as_json() -> None:
    made = json.loads(call("plan", "grpo", "--cluster", "h100-8", "--format", "json").output)
    assert set(made["predicted"]) == {
        "cluster",
        "seconds",
        "pools",
        "assumed",
        "in_flight",
        "calibrated",
        "headline",
        "stream",
    }
    assert set(made["peak"]["main"]) == {"bytes", "capacity", "step", "parts", "host", "free"}
    assert all(len(step["seconds"]) == 2 and step["bytes"] >= 0 for step in made["steps"])
    without = json.loads(call("plan", "grpo", "--devices", "8", "--format", "json").output)
    assert without["peak"] is without["predicted"] is None
    assert {step["seconds"] for step in without["steps"]} == {None}
    for step in made["steps"]:
        step["seconds"] = step["bytes"] = None
    embedded = [{**step, "path": "memory" if step["path"] else ""} for step in made["steps"]]
    assert embedded == without["steps"]


def test_a_plan_saved_for_a_cluster_is_read_and_runs_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert call("plan", "grpo", "--cluster", "h100-8", "-o", str(path)).exit_code == 0
    saved = parse(path.read_text())
    assert saved == compile_graph("grpo", target=Target("h100-8")) and saved.predicted
    again = compile_again(path).plan  # which would refuse it, did the two differ
    assert [step.node for step in again.steps] == [step.node for step in saved.steps]


@pytest.mark.parametrize(
    "options", ["--cluster h100-8 --devices 4", "--prompt-tokens 5", "--cluster cpu --response-tokens 0"]
)
def test_options_that_do_not_go_together(options: str) -> None:
    assert call("plan", "grpo", *options.split()).exit_code == 2


def test_layers_that_stay_gathered_move_fewer_bytes_and_take_memory() -> None:
    def planned(*settings: str) -> tuple[int, int]:
        given = [f"models.{name}.path=Qwen/Qwen2.5-1.5B" for name in ("policy", "ref")]
        given += ["models.policy.train.micro_tokens=2048", *settings]
        plan = compile_graph("grpo", given, target=Target("h100-8"))
        (update,) = (step for step in plan.steps if step.updated)
        assert update.bytes and plan.peak
        return update.bytes, plan.peak["main"].bytes

    by_size, layers, whole = (planned(*more) for more in ((), [RESHARD % "true"], [RESHARD % "false"]))
    assert by_size == layers
    assert whole[0] < layers[0] / 2 and whole[1] > layers[1]


RESHARD = "models.policy.train.reshard=%s"


def test_passes_that_score_have_a_size_of_their_own() -> None:
    def planned(*settings: str) -> tuple[float, float]:
        given = [f"models.{name}.path=Qwen/Qwen2.5-7B" for name in ("policy", "ref")]
        plan = compile_graph("grpo", [*given, *settings], target=Target("h100-8"))
        score = next(step for step in plan.steps if step.node == "ref_logprobs")
        update = next(step for step in plan.steps if step.updated)
        assert score.seconds and update.seconds
        return score.seconds[1], update.seconds[1]

    as_updates, small = (planned(f"models.ref.train.score_tokens={n}") for n in ("null", 1024))
    assert small[0] > as_updates[0] and small[1] == as_updates[1]


@pytest.mark.parametrize("name", ["sdft", "sdpo"])
def test_a_plan_for_a_cluster_whose_update_copies_weights_prints(name: str) -> None:
    """An update that copies another model's weights works on two models."""
    plan = compile_graph(name, target=Target("h100-8"))
    (copy,) = [step for step in plan.steps if step.copied and step.updated]
    assert f"{copy.id}. run {copy.node}" in plan_text(plan)
