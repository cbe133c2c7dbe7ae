"""Where engines, nodes and columns are put when a graph has several pools."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.hardware import Cluster
from rlgraph.errors import GraphError, RunError
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.planning.device_groups import together
from rlgraph.printing.plan_text import plan_text
from rlgraph.runtime.cluster.devices import Devices, agree
from rlgraph.runtime.cluster.placement import units

TWO = ["pools.train.devices=auto", "pools.gen.devices=auto"]
AHEAD = ["schedule.buffer={staleness: 1, by: batch}", "update_policy.in.old_logprobs=rollout_logprobs"]


@pytest.fixture
def split(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """Plans of a shipped graph with pools ``train`` and ``gen`` in place of its own."""

    def plan(name: str, *edits: str, devices: int = 8, pools: str = "train gen") -> Plan:
        path = tmp_path_factory.mktemp("split") / "split.yaml"
        new = ", ".join(f"pools.{pool}: {{devices: auto}}" for pool in pools.split())
        lines = [
            "graph: split",
            f"extends: {name}",
            "edits:",
            f"  - add: {{{new}}}",
            "  - remove: [pools.main]",
        ]
        path.write_text("\n".join([*lines, *(f"  - {edit}" for edit in edits)]) + "\n")
        return compile_graph(str(path), devices=devices)

    return plan


def step(plan: Plan, node: str) -> Step:
    return next(step for step in plan.steps if step.node == node)


def places(plan: Plan) -> dict[str, str]:
    return {step.node: step.pool for step in plan.steps if step.kind == "run"}


def test_generation_and_training_take_a_pool_each(split: Callable[..., Plan]) -> None:
    plan = split("ppo")
    assert plan.pools == {"train": 4, "gen": 4}
    found = places(plan)
    assert {found[node] for node in ("prompts", "rollout", "rewards")} == {"gen"}
    assert {found[node] for node in ("old_logprobs", "values", "update_policy", "update_critic")} == {"train"}
    engines = {name: (m.train and m.train.pool, m.serve and m.serve.pool) for name, m in plan.models.items()}
    assert engines == {"policy": ("train", "gen"), "ref": ("train", None), "critic": ("train", None)}


def test_an_engine_and_a_node_are_where_the_graph_says(split: Callable[..., Plan]) -> None:
    plan = split("ppo", "set: {models.ref.train.pool: gen, rewards.pool: train}")
    found = places(plan)
    assert (found["ref_logprobs"], found["rewards"]) == ("gen", "train")
    assert step(plan, "ref_logprobs").layout == "balanced/4"


def test_pools_that_are_auto_share_what_is_left() -> None:
    pools = ["pools.a.devices=auto", "pools.b.devices=auto", "pools.main.devices=3"]
    where = ["models.ref.train.pool=a", "models.policy.serve.pool=b", "models.policy.train.pool=main"]
    assert compile_graph("grpo", [*pools, *where], 8).pools == {"main": 3, "a": 3, "b": 2}
    assert compile_graph("grpo", [*pools, *where], 5).pools == {"main": 3, "a": 1, "b": 1}
    with pytest.raises(GraphError, match=r"(?s)main.devices: 3, .* 4 are asked for .* give --devices 5, or"):
        compile_graph("grpo", [*pools, *where], 4)


def test_columns_move_to_the_pool_that_reads_them(split: Callable[..., Plan]) -> None:
    plan = split("grpo")
    moves = [step for step in plan.steps if step.kind == "repartition" and step.pool == "train"]
    assert moves and all(name.partition("@")[2].startswith("train/") for m in moves for name in m.writes)
    assert "and they are on gen" in moves[0].because


def test_columns_that_lie_right_are_read_where_they_are(split: Callable[..., Plan]) -> None:
    # one device a pool: all rows are on it, here as there
    assert not [step for step in split("grpo", devices=2).steps if step.kind == "repartition"]
    # as many devices, and the same layout: nodes without a model
    plan = split("grpo", "set: {rewards.pool: train, advantages.pool: gen}", devices=4)
    assert "rewards" in step(plan, "advantages").reads


def test_a_sync_goes_from_pool_to_pool(split: Callable[..., Plan]) -> None:
    sync = step(split("grpo"), "sync:policy")
    assert (sync.pool, sync.source, sync.models) == ("gen", "train", {"policy": "v"})
    together = next(step for step in compile_graph("grpo", devices=4).steps if step.kind == "sync")
    assert (together.pool, together.source) == ("main", "")


def test_generation_ahead_reads_older_weights(split: Callable[..., Plan]) -> None:
    one = "set: {schedule.buffer: {staleness: 2, by: batch}, update_policy.in.old_logprobs: rollout_logprobs}"
    plan = split("grpo", one, "remove: [old_logprobs]")
    assert step(plan, "rollout").models == step(plan, "sync:policy").models == {"policy": "v-2"}
    assert step(plan, "update_policy").models == {"policy": "v"}


def test_an_evaluation_reads_the_weights_of_now(split: Callable[..., Plan]) -> None:
    one = "set: {schedule.buffer: {staleness: 1, by: batch}, update_policy.in.old_logprobs: rollout_logprobs}"
    plan = split("demo", one, "remove: [old_logprobs]")
    assert {v for step in plan.eval_steps for v in step.models.values()} == {"v"}


def test_staleness_is_part_of_what_a_run_is(split: Callable[..., Plan]) -> None:
    edits = ("set: {update_policy.in: {old_logprobs: rollout_logprobs}}", "remove: [old_logprobs]")
    fresh, stale = (
        split("grpo", *edits, f"set: {{schedule.buffer: {{staleness: {k}, by: batch}}}}") for k in (0, 1)
    )
    assert fresh.digest != stale.digest


def test_staleness_without_a_pool_for_generation_is_refused() -> None:
    with pytest.raises(GraphError, match=r"generates and trains on one pool, main"):
        compile_graph("grpo", AHEAD, 4)


@pytest.mark.parametrize("devices", [2, 8])
def test_the_plan_as_text(
    split: Callable[..., Plan], golden: Callable[[str, str], None], devices: int
) -> None:
    loss = "replace: {update_policy.loss: {kind: decoupled_ppo}}"
    plan = split("grpo", loss, "set: {schedule.buffer: {staleness: 1, by: batch}}", devices=devices)
    golden(f"plan/split-{devices}.txt", plan_text(plan))


SMALL = [f"models.{name}.path=Qwen/Qwen2.5-0.5B" for name in ("policy", "ref")]


def test_a_pool_takes_whole_hosts() -> None:
    given = [*SMALL, "pools={main: {hosts: 2, devices: 16}}"]
    plan = compile_graph("grpo", given, target=Target("h100-16"))
    assert (together(plan), units(plan.pools, together(plan))) == ({"main": 8}, [("main", 8)] * 2)
    agree(plan, Devices("the cluster", "cuda", (8, 4, 8), of_h100))
    law = r"takes 2 whole hosts of 8 devices \(pools\.main\.hosts\), and the cluster has hosts of 8, 4, 4"
    with pytest.raises(RunError, match=law):
        agree(plan, Devices("the cluster", "cuda", (8, 4, 4), of_h100))


def of_h100() -> Cluster:
    return load_cluster("h100-16")


@pytest.mark.parametrize(
    ("pools", "settings", "law"),
    [
        ("{main: {hosts: 3, devices: 16}}", [], "its 16 devices can't be shared out among them"),
        ("{main: {hosts: 4, devices: 16}}", [], "4 devices each from device 0 on; hosts of h100-16 have 8"),
        (
            "{main: {devices: 8}, gen: {hosts: 2, devices: 8}}",
            ["models.policy.serve={engine: sglang, tensor_parallel: 8}"],
            "its 8 devices can't be shared out among them, in whole groups",
        ),
    ],
)
def test_hosts_that_a_pool_can_not_take_whole_are_refused(pools: str, settings: list[str], law: str) -> None:
    with pytest.raises(GraphError, match=law):
        compile_graph("grpo", [*SMALL, f"pools={pools}", *settings], target=Target("h100-16"))
