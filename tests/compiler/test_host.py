"""What train engines keep in host memory, in plans: what it saves and costs, and where it is proposed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlgraph.autoplace import autoplace
from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import BEST, WORST, Rates
from rlgraph.costs.formulas import Tokens, activation_seconds, host_step_seconds
from rlgraph.costs.hardware import FOLDER
from rlgraph.costs.model_size import size_of
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.planning.predict import Scenario, predict
from rlgraph.printing.plan_text import plan_text
from rlgraph.request import PlanRequest
from rlgraph.search.candidate import Candidate
from rlgraph.search.layout import HOST, PoolLayout
from rlgraph.search.layout_search import search
from rlgraph.search.moves import Settings
from rlgraph.search.text import contest_text
from rlgraph.syntax.yaml_text import overrides
from usual_settings import usual

EIGHT, LARGE = "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"
ON_HOST = "models.policy.train.optimizer_offload=true"
INPUTS = "models.policy.train.activation_offload=true"
AGAIN = "models.policy.train.recompute=true"
TIGHT = ["models.policy.serve.tensor_parallel=8", AGAIN, "models.policy.train.micro_tokens=4096"]


def planned(*more: str, path: str = EIGHT, cluster: str = "h100-8") -> Plan:
    paths = [f"models.{name}.path={path}" for name in ("policy", "ref")]
    return compile_graph("grpo", [*paths, *more], target=Target(cluster))


def update(plan: Plan) -> Step:
    (step,) = [step for step in plan.steps if step.updated]
    return step


def test_masters_and_averages_are_on_the_host() -> None:
    small = [AGAIN, "models.policy.serve.cache_tokens=65536"]
    device, host = planned(*small), planned(*small, ON_HOST)
    shard = size_of(EIGHT).on_device(8)
    before, after = (plan.peak["main"] for plan in (device, host) if plan.peak)
    assert before.step == after.step == "update_policy"
    assert before.parts["optimizer"] == 8 * shard and "optimizer" not in after.parts
    assert before.parts["gradients"] == after.parts["gradients"]
    reference = 2 * shard  # that is beside it
    assert before.parts["weights"] - reference == 2 * (after.parts["weights"] - reference) == 4 * shard
    assert not before.host
    # three numbers of each weight, and two buckets of gradients and weights on their way
    largest = max(size_of(EIGHT).numbers) // 8
    assert after.host == {"optimizer": 12 * shard + 2 * max(2**26, largest) * (4 + 2)}
    text = plan_text(host)
    assert "optimizer on the host" in text and "beside it, in its host's memory: optimizer 13.2 GB" in text
    assert "steps 4.1 GB of gradients on its host" in text


def test_a_step_takes_the_longest_of_three_or_all_of_them() -> None:
    cluster, numbers = load_cluster("h100-8"), 10**9
    best, worst = (Rates(cluster, 8, "bfloat16", grade) for grade in (BEST, WORST))
    come, stepped, go = 4e9 / 64e9, 1e9, 2e9 / 64e9
    assert host_step_seconds(numbers, best) == max(come / 0.8, stepped / 5e8, go / 0.8)
    assert host_step_seconds(numbers, worst) == pytest.approx(come / 0.4 + stepped / 1e8 + go / 0.4)
    measured = cluster.model_copy(update={"host_step": 2e8})
    best, worst = (Rates(measured, 8, "bfloat16", grade) for grade in (BEST, WORST))
    assert host_step_seconds(numbers, best) == 1e9 / 2e8
    assert host_step_seconds(numbers, worst) == pytest.approx(come / 0.4 + 1e9 / 2e8 + go / 0.4)
    device, host = update(planned(AGAIN)), update(planned(AGAIN, ON_HOST))
    assert device.seconds and host.seconds
    shard, steps = size_of(EIGHT).on_device(8), 4
    assert host.seconds[0] - device.seconds[0] == pytest.approx(steps * shard / 5e8, rel=0.05)


def test_a_model_that_does_not_fit_is_told_of_it() -> None:
    with pytest.raises(GraphError, match=ON_HOST) as error:
        planned(*usual(TIGHT), path=LARGE)
    assert "or 16 devices" in str(error.value)
    assert planned(*TIGHT, ON_HOST, path=LARGE).peak["main"].fits


@pytest.mark.slow
def test_it_is_proposed_neither_for_adapters_nor_muon_nor_for_cpus() -> None:
    lora = ["models.policy.train.lora={rank: 4}", "models.policy.train.micro_tokens=4000000"]
    muon = [*TIGHT, "models.policy.optimizer.kind=muon", "rollout.max_new_tokens=20000"]
    for settings, cluster in ((lora, "h100-8"), (muon, "h100-8"), ([], "cpu")):
        with pytest.raises(GraphError, match="does not fit") as error:
            planned(*usual(settings), path=LARGE, cluster=cluster)
        assert "optimizer_offload" not in str(error.value)


def test_on_cpus_nothing_is_saved() -> None:
    """Their memory is the host's: weights are there twice."""
    cluster = load_cluster("cpu").model_copy(update={"memory": 1e12, "host_memory": None})
    paths = [f"models.{name}.path={EIGHT}" for name in ("policy", "ref")]
    device, host = (
        predict(compile_graph("grpo", [*paths, *more], 4), Scenario(cluster)).peak["main"]
        for more in ([], [ON_HOST])
    )
    assert host.bytes - device.bytes == 4 * size_of(EIGHT).on_device(4) and not host.host


def test_hosts_have_to_hold_it() -> None:
    cluster = load_cluster("h100-8").model_copy(update={"host_memory": 50e9})
    paths = [f"models.{name}.path={EIGHT}" for name in ("policy", "ref")]
    plan = compile_graph("grpo", [*paths, ON_HOST, AGAIN], 8, device="cuda")
    with pytest.raises(GraphError, match=r"leaves the devices of pool main takes 10\d GB of a host"):
        predict(plan, Scenario(cluster))


def test_pools_of_a_host_share_its_memory() -> None:
    cluster = load_cluster("h100-8").model_copy(update={"host_memory": 90e9})
    models = [f"models.{name}.path={EIGHT}" for name in ("policy", "critic", "ref")]
    more = ("optimizer_offload=true", "recompute=true", "micro_tokens=4096")
    trains = [f"models.{name}.train.{setting}" for name in ("policy", "critic") for setting in more]
    pools = ["pools={a: {devices: 4}, b: {devices: 4}}", "models.critic.train.pool=b"]
    plan = compile_graph("ppo", [*models, *pools, *trains], 8, device="cuda")
    with pytest.raises(GraphError, match=r"leaves the devices of pool a and b takes 2\d\d GB of a host"):
        predict(plan, Scenario(cluster))
    apart = cluster.model_copy(update={"devices": 4, "hosts": 2, "host_memory": 140e9})
    peaks = predict(plan, Scenario(apart)).peak
    assert all(60e9 < 4 * sum(peak.host.values()) < 140e9 for peak in peaks.values())


def test_the_search_tries_it_where_nothing_else_fits() -> None:
    plan = replace(planned(cluster="h100-8"), device="cuda")
    assert plan.peak

    def tried(needs: set[str]) -> set[str]:
        """What the layouts have on the host where only those fit that have so much there."""

        def evaluate(settings: Settings) -> Candidate:
            on_host = {path.rpartition(".")[2] for path in settings if path.endswith("_offload")}
            peak = replace(plan.peak["main"], capacity=2**60 if needs <= on_host else 1)
            return Candidate(settings, replace(plan, peak={"main": peak}))

        found = search(plan, 8, 8, evaluate)
        assert found[0].fits
        return {candidate.layout.host for candidate in found if candidate.layout}

    both = [*HOST]
    assert tried(set()) == {both[0]}
    assert tried({"optimizer_offload"}) == {*both[:2]}
    assert tried({"optimizer_offload", "activation_offload"}) == {*both}


def test_the_search_leaves_out_what_a_model_refuses() -> None:
    """Each of its layouts can be planned: for Muon on devices, and for layers that are divided."""
    muon, halves = "models.policy.optimizer.kind=muon", "models.policy.train.tensor_parallel=2"
    plan = planned(muon, "models.ref.train.tensor_parallel=2")
    both = PoolLayout(0, frozenset(), 1, 4096, True, shard=4, host=[*HOST][2], sequence=2)
    planned(muon, "models.ref.train.tensor_parallel=2", *overrides(both.settings(plan, 8)))
    settings = both.settings(planned(halves), 8)
    assert {path for path in settings if path.endswith(("shard", "sequence_parallel"))} == {
        "models.ref.train.shard",
        "models.ref.train.sequence_parallel",
    }


@pytest.mark.nightly
def test_the_search_finds_where_a_large_model_fits() -> None:
    settings = [f"models.{name}.path={LARGE}" for name in ("policy", "ref")]
    _, compilation = autoplace(PlanRequest("grpo", settings, target=Target("h100-8")))
    best = compilation.plan
    assert best.peak and best.peak["main"].fits
    assert best.models["policy"].train.optimizer_offload and not best.models["ref"].train.optimizer_offload


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "hosts", "tokens"), [(LARGE, 8, 65_024), ("Qwen/Qwen3-235B-A22B", 16, 32_256)]
)
def test_the_search_finds_where_long_answers_of_large_models_fit(
    model: str, hosts: int, tokens: int, tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text((FOLDER / "h100-8.yaml").read_text().replace("hosts: 1", f"hosts: {hosts}"))
    settings = [f"models.policy.path={model}", f"rollout.max_new_tokens={tokens}"]
    candidates, compilation = autoplace(PlanRequest("dr_grpo", settings, target=Target(str(cluster))))
    best = compilation.plan
    assert best.peak and all(peak.fits for peak in best.peak.values())
    assert candidates[0].layout and candidates[0].layout.group == 8
    assert "the same with " in contest_text(candidates)


def test_a_run_may_go_on_with_it_or_without() -> None:
    assert planned(ON_HOST, INPUTS).digest == planned(ON_HOST).digest == planned().digest


def test_inputs_of_layers_are_on_the_host() -> None:
    long = [AGAIN, "models.policy.train.micro_tokens=65536", "models.policy.serve.cache_tokens=65536"]
    device, host = planned(*long), planned(*long, INPUTS)
    before, after = (plan.peak["main"] for plan in (device, host) if plan.peak)
    assert before.step == after.step == "update_policy"
    hidden, layers = 65536 * 4096 * 2, 36
    # two inputs of the layers' are on the device, on their way
    assert before.parts["activations"] - after.parts["activations"] == (layers - 2) * hidden
    assert after.host == {"activations": layers * hidden}
    assert "activations on the host" in plan_text(host)
    assert planned(INPUTS).models["policy"].train.recompute is True


def test_what_waits_takes_whole_powers_of_two() -> None:
    odd = planned(AGAIN, INPUTS, "models.policy.train.micro_tokens=50000")
    assert odd.peak["main"].host == {"activations": 36 * 65536 * 4096 * 2}


def test_copies_hide_behind_passes_at_best() -> None:
    size, cluster = size_of(EIGHT), load_cluster("h100-8")
    best, worst = (Rates(cluster, 8, "bfloat16", grade) for grade in (BEST, WORST))
    work = Tokens(65536, 65536 * 4096, 4)
    assert activation_seconds(size, best, work) == 0
    there = 36 * 4096 * 2 * 65536 / (64e9 * 0.4)
    assert activation_seconds(size, worst, work) == pytest.approx(2 * there)
    slow = Rates(cluster.model_copy(update={"host_link": 1e9}), 8, "bfloat16", BEST)
    there = 36 * 4096 * 2 * 65536 / 0.8e9
    assert there < activation_seconds(size, slow, work) < 2 * there
    device, host = update(planned(AGAIN)), update(planned(AGAIN, INPUTS))
    assert device.seconds and host.seconds
    assert device.seconds[0] == host.seconds[0] and device.seconds[1] < host.seconds[1]


def test_long_rows_are_told_of_it() -> None:
    long = [AGAIN, "rollout.max_new_tokens=63488", "prompts.batch=8", ON_HOST]
    long += ["models.policy.serve.tensor_parallel=8"]
    with pytest.raises(GraphError, match="activation_offload=true"):
        planned(*usual(long), path=LARGE)
    assert planned(*long, INPUTS, path=LARGE).peak["main"].fits


def test_a_32b_trains_on_one_host_with_its_optimizer_beside_the_devices() -> None:
    """The command of docs/planning.md."""
    paths = [f"models.{name}.path=Qwen/Qwen3-32B" for name in ("policy", "ref")]
    settings = [*paths, "rollout.max_new_tokens=7168", "models.policy.serve.tensor_parallel=8"]
    settings.append("models.policy.train.recompute=true")
    with pytest.raises(GraphError, match="does not fit on h100-8"):
        compile_graph("grpo", usual(settings), target=Target("h100-8"))
    settings.append("models.policy.train.optimizer_offload=true")
    plan = compile_graph("grpo", settings, target=Target("h100-8"))
    assert plan.peak and plan.peak["main"].fits
