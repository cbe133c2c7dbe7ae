"""`rollout_logprobs` beside `old_logprobs`: always measured, never taken for them unbidden."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.frontend.bind import bind
from rlgraph.frontend.compose import compose
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.trace import sampler, writer
from rlgraph.lowering import lower
from rlgraph.printing.plan_text import plan_text

APART = "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"
RECORDED = "replace: {rollout: {op: data.recorded, model: policy, run: runs/ppo, columns: %s}}"
REWARDS = '{rewards: "float32[samples]"}'
WITHOUT = "remove: [prompts, rewards]"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lowered(base: str, *edits: str) -> Graph:
    body = "".join(f"  - {edit}\n" for edit in edits)
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\n" + (f"edits:\n{body}" if edits else ""))
    return lower(bind(compose("edited.yaml"), 2))


def problems(base: str, *edits: str) -> list[tuple[str, str]]:
    with pytest.raises(GraphError) as caught:
        lowered(base, *edits)
    return [(problem.kind, problem.remedy) for problem in caught.value.problems]


def updates(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.call and node.op.name == "update.policy"]


@pytest.mark.parametrize("name", shipped_graphs())
def test_every_shipped_graph_measures_and_says_what_it_divides_by(name: str) -> None:
    graph = lower(bind(compose(name), 2))
    for node in updates(graph):
        rollout = sampler(graph, node.domain)
        assert node.call
        if rollout is None or writer(graph, node.call.ins["tokens"]) is not rollout:
            continue  # from data, or behind another prompt
        measured = node.call.ins.get("rollout_logprobs")
        assert measured and writer(graph, measured) is rollout
        old = node.call.ins.get("old_logprobs")
        asked = compose(name).at(("nodes", node.name, "in", "old_logprobs"))
        if old and writer(graph, old) is rollout:
            assert asked.value == re.split(r"[*/@]", measured)[0]


@pytest.mark.parametrize("base", ["ppo", "grpo", "gspo", "gpg", "decoupled_ppo"])
@pytest.mark.parametrize(
    "edits",
    [
        (),
        ("set: {rollout.out: {rollout_logprobs: sampled}}",),
        ("rename: {rollout_logprobs: sampled}",),
        ("add: {mixed: {op: filter.mixed}}", "set: {advantages.rows: mixed}"),
    ],
    ids=["plain", "out", "rename", "filter"],
)
def test_it_is_measured_under_any_name(base: str, edits: tuple[str, ...]) -> None:
    if base == "decoupled_ppo" and edits and "out:" in edits[0]:
        edits = (*edits, "set: {update_policy.in: {rollout_logprobs: sampled}}")  # its loss is told
    graph = lowered(base, *edits)
    (update,) = updates(graph)
    assert update.call
    assert writer(graph, update.call.ins["rollout_logprobs"]).name == "rollout"


def test_another_rollout_s_are_not_measured_against() -> None:
    second = "add: {greedy: {op: rollout, model: policy, n: 1, temperature: 0, max_new_tokens: 8, "
    second += "out: {tokens: t, loss_mask: m, rollout_logprobs: l, responses: r, group: g, truncated: c}}, "
    second += "more: {op: update.policy, model: policy, loss: {kind: sft}, in: {tokens: t, loss_mask: m}}}"
    graph = lowered("grpo", second)
    columns = {node.name: node.call.ins.get("rollout_logprobs", "") for node in updates(graph) if node.call}
    assert columns["update_policy"].startswith("rollout_logprobs")
    assert not columns["more"]


@pytest.mark.parametrize("base", ["ppo", "grpo", "dapo", "gspo"])
def test_the_recompute_is_not_dropped_for_what_the_rollout_measured(base: str) -> None:
    ratio = "set: {update_policy.minibatches: 2, update_policy.in: {old_logprobs: rollout_logprobs}}"
    graph = lowered(base, "set: {update_policy.minibatches: 2}")
    (update,) = updates(graph)
    assert update.call and writer(graph, update.call.ins["old_logprobs"]).op.name == "logprobs"
    # without the recompute nothing stands in for it
    ((kind, remedy), *_) = problems(base, "set: {update_policy.minibatches: 2}", "remove: [old_logprobs]")
    assert kind == "missing-column" and "old_logprobs: {op: logprobs, model: policy}" in remedy
    # but where the graph says so
    shaped = "set: {shaped.in: {old_logprobs: rollout_logprobs}}"
    graph = lowered(base, ratio, *([shaped] if base == "ppo" else []), "remove: [old_logprobs]")
    (update,) = updates(graph)
    assert update.call and writer(graph, update.call.ins["old_logprobs"]).name == "rollout"


def test_recorded_rows_are_rows_of_older_weights() -> None:
    recorded = (RECORDED % REWARDS, WITHOUT)
    found = problems("grpo", *recorded)
    assert [kind for kind, _ in found] == ["stale-ratio"]
    for edit in (
        "set: {update_policy.in: {old_logprobs: rollout_logprobs}}",
        "add: {rollout_weights: {op: correction.tis}}",
        "set: {update_policy.loss.kind: decoupled_ppo, update_policy.loss.cap: 2.0}",
    ):
        assert (
            edit.replace("in: {old_logprobs: r", "in.old_logprobs: r").replace("s}}", "s}")[:40]
            in found[0][1]
        )
        graph = lowered("grpo", *recorded, edit)
        (update,) = updates(graph)
        assert update.call
        rollout = sampler(graph, update.domain)
        assert rollout and rollout.name == "rollout"
        assert writer(graph, update.call.ins["rollout_logprobs"]) is rollout
    assert [kind for kind, _ in problems("gpg", *recorded)] == ["off-policy"]


def test_recorded_rows_need_no_engine_and_lie_together() -> None:
    graph = lowered("grpo", RECORDED % REWARDS, WITHOUT, "set: {update_policy.loss: {kind: decoupled_ppo}}")
    names = [node.name for node in graph.nodes]
    assert not any(name.startswith(("sync", "repeat")) for name in names)
    assert graph.node("advantages").layout == "one"  # which samples are a group is not known by their place
    assert graph.node("update_policy").layout.startswith("balanced")
    assert graph.node("old_logprobs").call.attributes["temperature"] == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ('{rewards: "float"}', "wrong-value"),
        ('{rewards: "float32[rows]"}', "wrong-value"),
        ('{tokens: "int64[samples, tokens]"}', "two-writers"),
        ('{rewards: "int64[samples]"}', "wrong-dtype"),
    ],
)
def test_columns_that_no_node_could_read_are_refused(columns: str, kind: str) -> None:
    edit = "set: {update_policy.in: {old_logprobs: rollout_logprobs}}"
    assert kind in [found for found, _ in problems("grpo", RECORDED % columns, WITHOUT, edit)]


def test_recorded_rows_say_which_model_sampled_them() -> None:
    nobody = (RECORDED % REWARDS).replace("model: policy, ", "")
    assert problems("grpo", nobody, WITHOUT)[0][0] == "no-model"


def test_a_plan_says_which_iterations_are_recorded() -> None:
    for every, said in ((10, "iterations 1, 11, 21, ..."), (1, "every iteration")):
        plan = compile_graph("grpo", [f"schedule.record_every={every}"], devices=1)
        assert f"repeat 500 times, keeping the columns of {said} in recorded/\n" in plan_text(plan)
    assert "recorded/" not in plan_text(compile_graph("grpo", devices=1))
