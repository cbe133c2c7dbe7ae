"""Laws that ops assume of the graph around them, what resolve fills in, and what elide leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.frontend.bind import bind
from rlgraph.frontend.compose import compose
from rlgraph.ir.graph import Graph
from rlgraph.ir.plan import Plan
from rlgraph.laws.nodes import CALL_LAWS
from rlgraph.lowering import lower
from rlgraph.printing.plan_text import plan_text


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def edited(base: str, *edits: str) -> str:
    """A graph file: a shipped graph with edits, each as YAML."""
    body = "".join(f"  - {edit}\n" for edit in edits)
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\nedits:\n{body}" if edits else "")
    return "edited.yaml" if edits else base


def lowered(base: str, *edits: str, devices: int = 2) -> Graph:
    return lower(bind(compose(edited(base, *edits)), devices))


def planned(base: str, *edits: str) -> Plan:
    return compile_graph(edited(base, *edits), devices=2)


def nodes(plan: Plan) -> list[str]:
    return [step.node for step in plan.steps]


@pytest.mark.parametrize(
    ("kind", "base", "edits", "mended"),
    [
        ("small-groups", "grpo", ["set: {rollout.n: 1}"], "set: {rollout.n: 8}"),
        ("wrong-ratio", "grpo", ["set: {old_logprobs.model: ref}"], "set: {old_logprobs.model: policy}"),
        (
            "wrong-ratio",
            "ppo",
            ["set: {old_logprobs.model: policy@next}"],
            "set: {old_logprobs.model: policy}",
        ),
        ("wrong-ratio", "grpo", ["set: {rollout.model: ref}"], "set: {old_logprobs.model: ref}"),
        (
            "off-policy",
            "grpo",
            ["set: {update_policy.loss: {kind: reinforce}}"],
            "set: {update_policy.minibatches: 1}",
        ),
        (
            "off-policy",
            "grpo",
            ["set: {update_policy.loss: {kind: reinforce}, update_policy.epochs: 2}"],
            "replace: {update_policy.loss: {kind: ppo_clip}}",
        ),
        (
            "off-policy",
            "grpo",
            [
                "set: {update_policy.loss: {kind: reinforce}, update_policy.minibatches: 1}",
                "set: {rollout.model: ref}",
            ],
            "set: {rollout.model: policy}",
        ),
        ("same-reference", "grpo", ["set: {ref_logprobs.model: policy}"], "set: {ref_logprobs.model: ref}"),
        ("same-reference", "ppo", ["set: {ref_logprobs.model: policy}"], "set: {ref_logprobs.model: ref}"),
        (
            "no-critic",
            "ppo",
            ["set: {advantages.in.values: old_logprobs}"],
            "remove: [advantages.in.values]",
        ),
        (
            "other-critic",
            "ppo",
            [
                "add: {models.other: {path: x, head: value, optimizer: {lr: 1e-5}}}",
                "set: {update_critic.model: other}",
            ],
            "set: {update_critic.model: critic}",
        ),
        (
            "temperature",
            "grpo",
            ["set: {rollout.temperature: 0.7, old_logprobs.temperature: 1.0}"],
            "remove: [old_logprobs.temperature]",
        ),
        (
            "norm",
            "grpo",
            ["set: {update_policy.aggregate: seq-mean-token-sum-norm}"],
            "set: {update_policy.norm: '${nodes.rollout.max_new_tokens}'}",
        ),
        ("norm", "grpo", ["set: {update_policy.norm: 8}"], "set: {update_policy.norm: null}"),
        (
            "no-sampler",
            "demo_sft",
            [
                "add: {old: {op: logprobs, model: policy}}",
                "set: {update_policy.in: {old_logprobs: old, advantages: old}}",
                "replace: {update_policy.loss: {kind: ppo_clip}}",
            ],
            "set: {update_policy: {op: update.policy, model: policy, loss: {kind: sft}}}",
        ),
    ],
)
def test_a_broken_law_is_refused_and_its_remedy_accepted(
    kind: str, base: str, edits: list[str], mended: str
) -> None:
    with pytest.raises(GraphError) as caught:
        lowered(base, *edits)
    assert kind in [problem.kind for problem in caught.value.problems]
    assert all(problem.mark and problem.remedy for problem in caught.value.problems)
    lowered(base, *edits, mended)


def test_the_drawing_shows_the_weights_and_the_columns() -> None:
    with pytest.raises(GraphError) as caught:
        lowered("grpo", "set: {old_logprobs.model: ref}")
    assert "rollout (policy@v)\n" in str(caught.value)
    assert "└─ old_logprobs ─> update_policy (policy@v)" in str(caught.value)


def test_every_law_is_assumed_by_something_shipped() -> None:
    from rlgraph.nodes import LOSSES, OPS
    from rlgraph.ops.registry import load

    assumed = {law for target in (*OPS.values(), *LOSSES.values()) for law in load(target).declared.assumes}
    assert assumed == CALL_LAWS.keys()


def test_rollout_logprobs_may_stand_in_for_the_recompute_when_the_graph_says_so() -> None:
    plan = planned("grpo", "set: {update_policy.in: {old_logprobs: rollout_logprobs}}")
    assert "old_logprobs" not in nodes(plan)


def test_the_temperature_is_the_rollouts() -> None:
    graph = lowered("ppo", "set: {rollout.temperature: 0.7}")
    calls = {node.name: node.call.attributes for node in graph.nodes if node.call}
    found = {name: values["temperature"] for name, values in calls.items() if "temperature" in values}
    assert found == dict.fromkeys(("rollout", "old_logprobs", "ref_logprobs", "update_policy"), 0.7)
    greedy = lowered("grpo", "set: {rollout.temperature: 0}").node("update_policy").call
    assert greedy
    assert greedy.attributes["temperature"] == 1.0


def test_one_optimizer_step_makes_old_logprobs_redundant() -> None:
    plan = planned("grpo", "set: {update_policy.minibatches: 1}")
    assert "old_logprobs" not in nodes(plan)
    assert "note: left out `old_logprobs`" in plan_text(plan)
    assert "old_logprobs" not in plan.functions["train"]["update_policy"].ins


ONE = "set: {update_policy.minibatches: 1}"
PENALTY = [
    "add: {shaped: {op: reward.kl_penalty}, models.critic: {path: x, head: value, frozen: true}}",
    "add: {values: {op: values, model: critic}}",
    "replace: {advantages: {op: advantage.gae, in: {rewards: shaped}}}",
]


@pytest.mark.parametrize(
    "edits",
    [
        ["set: {update_policy.minibatches: 2}"],
        [ONE, "set: {update_policy.epochs: 2}"],
        [ONE, "set: {old_logprobs.keep: true}"],
        [ONE, *PENALTY],  # the penalty reads it too
    ],
)
def test_it_stays_where_it_is_needed_or_kept(edits: list[str]) -> None:
    assert "old_logprobs" in nodes(planned("grpo", *edits))


def test_twins_are_reported_and_both_run() -> None:
    plan = planned(
        "ppo",
        "add: {again: {op: logprobs, model: ref}}",
        "set: {shaped.in: {ref_logprobs: again}}",
        "set: {update_policy.kl_coef: 0.1}",
    )
    assert {"again", "ref_logprobs"} <= set(nodes(plan))
    (note,) = [note for note in plan.notes if "compute the same" in note]
    assert "`again`" in note


def test_a_kl_to_the_policy_that_sampled_is_legal() -> None:
    near = "set: {update_policy.in.ref_logprobs: rollout_logprobs, update_policy.kl: k2}"
    plan = planned("grpo", near)
    read = plan.functions["train"]["update_policy"].ins["ref_logprobs"]
    assert read.partition("@")[0] == "rollout_logprobs"
    with pytest.raises(GraphError, match="measures the KL to a reference"):
        lowered("grpo", "set: {update_policy.in.ref_logprobs: old_logprobs}")


def test_a_limit_on_wrong_rows_wants_a_loss_that_reads_advantages() -> None:
    limited = "set: {update_policy.off_policy_limit: 0.5}"
    lowered("grpo", limited)
    with pytest.raises(GraphError, match="reads no `advantages`"):
        lowered("sft", limited)


def test_a_loss_that_may_do_without_its_mask_leaves_the_update_in_need_of_it() -> None:
    with pytest.raises(GraphError, match="reads column `whole_mask`, which nothing writes"):
        lowered("grpo", "set: {update_policy.in.loss_mask: whole_mask}")
