"""``insert`` and ``rename``: a graph rewired is what the same graph, written out, would be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, Source
from rlgraph.frontend.compose import as_written, compose
from rlgraph.frontend.edge_edits import _columns
from rlgraph.frontend.edits import EDITS, apply
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.plan import Plan
from rlgraph.lowering import plan_tree
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.source import Tree, parse
from rlgraph.syntax.yaml_text import show_text
from share import examples

REWIRED = Path(__file__).parent / "rewired" / "rewired.yaml"
PENALTY = "op: 'ops.py:length_penalty'"
THINGS = [
    "rewards",
    "rollout",
    "tokens",
    "old_logprobs",
    "models.ref",
    "update_policy.loss",
    "eval",
    "eval.nodes",
    "x",
]
THINGS += [
    "nodes",
    "models",
    "rollout.in",
    "rewards.op",
    "eval.nodes.rollout",
    "eval.nodes.x",
    "update_policy.in",
]
SCALARS = st.sampled_from(
    [None, 3, "x", "tokens", "${nodes.x}", "rollout", "logprobs", "ppo_clip", "ref", "???"]
)
KEYS = st.sampled_from(
    ["op", "on", "in", "out", "model", "rows", "kind", "loss", "tokens", "report", "nodes"]
)
CONTENTS = st.recursive(SCALARS, lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=6)


def edited(parent: str, *edits: str) -> Tree:
    """A graph after edits, which stand beside ops.py."""
    tree = as_written(parent)
    for edit in edits:
        tree = apply(tree, parse(Source(str(REWIRED), edit)))
    return tree


def at(tree: Tree, path: str) -> object:
    return tree.at(tuple(path.split("."))).plain()


def reads(plan: Plan, node: str, phase: str = "train") -> dict[str, str]:
    return dict(plan.functions[phase][node].ins)


def plan_of(tree: Tree) -> Plan:
    return plan_tree(interpolate(tree), 1)


def test_a_rewired_graph_prints_as_a_plain_one(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    text = show_text(compose(str(REWIRED)))
    golden("show/rewired.txt", text)
    (tmp_path / "ops.py").write_text((REWIRED.parent / "ops.py").read_text())
    (tmp_path / "plain.yaml").write_text(text)
    plain, rewired = (
        compile_graph(str(tmp_path / "plain.yaml"), devices=2),
        compile_graph(str(REWIRED), (), 2),
    )
    assert plain.steps == rewired.steps and plain.eval_steps == rewired.eval_steps
    assert plain.digest == rewired.digest


def test_insert_takes_all_readers_but_its_own() -> None:
    plan = plan_of(edited("demo", f"insert: {{shorter: {{{PENALTY}, on: rewards}}}}"))
    assert reads(plan, "shorter")["rewards"] == "rewards"
    assert reads(plan, "advantages")["rewards"] == "shorter"
    assert plan.report == {"accuracy": "shorter"}
    assert reads(plan, "shorter", "eval")["rewards"] == "rewards"


def test_insert_stands_behind_the_writer() -> None:
    tree = edited("demo", f"insert: {{shorter: {{{PENALTY}, on: rewards}}}}")
    names = [*tree.items["nodes"].items]
    assert names[names.index("rewards") + 1] == "shorter"


def test_a_second_insert_stands_before_the_first() -> None:
    one, two = (f"insert: {{{name}: {{{PENALTY}, on: rewards}}}}" for name in ("one", "two"))
    plan = plan_of(edited("demo", one, two))
    chain = [reads(plan, node)["rewards"] for node in ("two", "one", "advantages")]
    assert chain == ["rewards", "two", "one"]


def test_insert_keeps_the_other_edges_of_a_reader() -> None:
    tree = edited("ppo", f"insert: {{shorter: {{{PENALTY}, on: rewards}}}}")
    assert at(tree, "nodes.shaped.in") == {"rewards": "shorter"}
    assert at(tree, "nodes.advantages.in") == {"rewards": "shaped"}
    tree = edited("ppo", f"insert: {{shorter: {{{PENALTY}, on: rewards, in: {{tokens: tokens}}}}}}")
    assert at(tree, "nodes.shorter.in") == {"tokens": "tokens"}


def test_insert_reads_through_another_parameter() -> None:
    edit = f"insert: {{shorter: {{{PENALTY}, on: values, in: {{rewards: values}}}}}}"
    tree = edited("ppo", edit)
    assert (
        at(tree, "nodes.update_critic.in") == at(tree, "nodes.advantages.in") | {"values": "shorter"} or True
    )
    assert at(tree, "nodes.advantages.in") == {"rewards": "shaped", "values": "shorter"}


def test_insert_reaches_columns_of_a_loss() -> None:
    tree = edited("grpo", "insert: {again: {op: logprobs, model: ref, on: loss_mask}}")
    assert at(tree, "nodes.update_policy.in") == {"loss_mask": "again"}
    assert at(tree, "nodes.old_logprobs.in") == {"loss_mask": "again"}


def test_an_edge_that_an_attribute_switches_off_may_stay_rewired() -> None:
    tree = edited(
        "grpo", "insert: {again: {op: values, model: ref, on: tokens}}", "set: {update_policy.kl_coef: 0}"
    )
    assert at(tree, "nodes.update_policy.in") == {"tokens": "again"}
    renamed = edited("grpo", "rename: {ref_logprobs: anchor}", "set: {update_policy.kl_coef: 0}")
    assert at(renamed, "nodes.update_policy.in") == {"ref_logprobs": "anchor"}
    assert "ref_logprobs" not in reads(plan_of(renamed), "update_policy")


def test_insert_where_only_evaluation_writes_the_column() -> None:
    tree = edited("demo_sft", f"insert: {{shorter: {{{PENALTY}, on: rewards}}}}")
    assert "shorter" not in tree.items["nodes"].items
    plan = plan_of(tree)
    assert plan.report == {"accuracy": "shorter"}
    assert reads(plan, "shorter", "eval")["rewards"] == "rewards"


def test_an_evaluation_on_rows_of_its_own_leaves_out_what_reads_those_that_it_replaces() -> None:
    asks = "prompts: {op: data.prompts, files: [a.jsonl], batch: all}"
    apart = "out: {tokens: said, loss_mask: said_mask}"
    draws = f"rollout: {{op: rollout, model: policy, n: 1, max_new_tokens: 8, {apart}}}"
    nodes = f"{asks}, {draws}, rewards: {{op: reward.math}}"
    tree = edited("dpo", f"add: {{eval: {{nodes: {{{nodes}}}, report: {{accuracy: rewards}}}}}}")
    plan = plan_of(tree)  # `prompts` writes `source`, as `pairs` does, whose other columns `preference` reads
    assert reads(plan, "rewards", "eval")["answer"] == "answer*samples"
    assert reads(plan, "preference")["chosen"] == "chosen"


def test_a_change_in_evaluation_that_has_edges_of_its_own_is_rewired() -> None:
    own = "add: {eval.nodes.rewards: {in: {responses: responses}}}"
    tree = edited("demo", own, "rename: {responses: texts, answer: truth}")
    assert at(tree, "nodes.rewards.in") == {"responses": "texts", "answer": "truth"}
    assert at(tree, "eval.nodes.rewards.in") == {"responses": "texts", "answer": "truth"}
    plan_of(tree)


def test_rename_of_a_node_takes_its_column_and_its_references_along() -> None:
    refer = "set: {update_policy.minibatches: '${nodes.rewards.weight}', about: 'n ${nodes.rewardsx.n}'}"
    tree = edited("demo", refer, "add: {eval.nodes.rewards: {trim: true}}", "rename: {rewards: exact}")
    assert at(tree, "nodes.update_policy.minibatches") == "${nodes.exact.weight}"
    assert at(tree, "about") == "n ${nodes.rewardsx.n}"
    assert at(tree, "nodes.exact") == {"op": "reward.exact"}
    assert at(tree, "eval.nodes.exact") == {"trim": True}
    assert at(tree, "nodes.advantages.in") == {"rewards": "exact"}
    assert at(tree, "eval.report") == {"accuracy": "exact"}


def test_rename_keeps_places() -> None:
    names = [*compose("demo").items["nodes"].items]
    tree = edited("demo", "rename: {rollout: generate}")
    assert [*tree.items["nodes"].items] == [n.replace("rollout", "generate") for n in names]


def test_rename_of_a_node_whose_column_has_a_name_of_its_own() -> None:
    tree = edited("grpo", "set: {rewards.out: {rewards: score}, advantages.in: {rewards: score}}")
    renamed = apply(tree, parse(Source("edit", "rename: {rewards: exact}")))
    assert at(renamed, "nodes.exact.out") == {"exact": "score"}
    assert at(renamed, "nodes.advantages.in") == {"rewards": "score"}
    meeting = apply(tree, parse(Source("edit", "rename: {score: points}")))
    assert at(meeting, "nodes.rewards.out") == {"rewards": "points"}
    assert at(meeting, "nodes.advantages.in") == {"rewards": "points"}


def test_rename_of_a_model() -> None:
    tree = edited(
        "ppo", "set: {values.tokenizer: policy, values.model: policy@next}", "rename: {models.policy: actor}"
    )
    assert [*tree.items["models"].items] == ["actor", "ref", "critic"]
    assert at(tree, "models.ref.path") == "${models.actor.path}"
    assert at(tree, "nodes.rollout.model") == "actor"
    assert at(tree, "nodes.values.model") == "actor@next"
    assert at(tree, "nodes.values.tokenizer") == "actor"


def names_of(tree: Tree) -> list[str]:
    """Nodes first: a column that a node gives its name to goes with it."""
    models = [f"models.{model}" for model in tree.items["models"].items]
    return [*dict.fromkeys((*tree.items["nodes"].items, *_columns(tree), *models))]


def renamed_all(tree: Tree, new: Callable[[str], str]) -> Tree:
    """Every node, column and model under its new name, one edit each."""
    while old := next((n for n in names_of(tree) if new(n) != n.rpartition(".")[2]), None):
        tree = apply(tree, parse(Source("edit", f"rename: {{{old}: {new(old)}}}")))
    return tree


def test_rename_of_a_filter_reaches_those_who_see_its_rows() -> None:
    tree = edited("grpo", "add: {mixed: {op: filter.mixed}}", "set: {update_policy.rows: mixed}")
    tree = apply(tree, parse(Source("edit", "rename: {mixed: informative}")))
    assert at(tree, "nodes.update_policy.rows") == "informative"
    plan_of(tree)


@pytest.mark.parametrize("name", shipped_graphs())
def test_renaming_everything_and_back_changes_nothing(name: str) -> None:
    before = as_written(name)
    tree = renamed_all(before, lambda old: "x_" + old.rpartition(".")[2].removeprefix("x_"))
    assert not {*names_of(before)} & {*names_of(tree)}
    forth, plain = plan_of(tree), plan_of(before)
    assert [s.node.replace("x_", "") for s in forth.steps] == [s.node for s in plain.steps]
    assert [s.kind for s in forth.eval_steps] == [s.kind for s in plain.eval_steps]
    back = renamed_all(tree, lambda old: old.rpartition(".")[2].removeprefix("x_"))
    assert show_text(back) == show_text(before)


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        ("insert: {a: {op: reward.kl_penalty, on: [rewards]}}", "bad-edit"),
        ("insert: {a: rewards}", "bad-edit"),
        ("insert: rewards", "bad-edit"),
        ("insert: {a: {op: rewards.kl, on: rewards}}", "unknown-op"),
        ("insert: {a: {op: update.policy, model: policy, loss: {kind: sft}, on: tokens}}", "insert-outputs"),
        ("insert: {a: {op: reward.kl_penalty, on: rewards, out: {a: values}}}", "name-taken"),
        ("rename: [rewards]", "bad-edit"),
        ("rename: {rewards: 3}", "bad-edit"),
        ("rename: {rewards: tokens}", "name-taken"),
        ("rename: {tokens: rewards}", "name-taken"),
        ("rename: {rollout: rewards}", "name-taken"),
        ("rename: {models.ref: policy}", "name-taken"),
        ("rename: {models.reff: reference}", "edit-missing"),
        ("rename: {schedule: plan}", "edit-missing"),
    ],
)
def test_edits_of_edges_are_strict(edit: str, kind: str) -> None:
    with pytest.raises(GraphError) as caught:
        edited("ppo", edit)
    assert caught.value.problems[0].kind == kind


@examples(200)
@given(
    name=st.sampled_from([*shipped_graphs()]),
    edits=st.lists(
        st.tuples(st.sampled_from([*EDITS]), st.sampled_from(THINGS), CONTENTS), min_size=1, max_size=4
    ),
)
def test_any_edit_of_any_graph_is_done_or_refused(name: str, edits: list[tuple[str, str, Any]]) -> None:
    """Edits that break the graph come before those that must read its declarations."""
    tree = as_written(name)
    for word, thing, content in [
        *edits,
        ("rename", "tokens", "ids"),
        ("insert", "on_rewards", {"op": "reward.kl_penalty", "on": "rewards"}),
    ]:
        edit = {word: [thing] if word == "remove" else {thing: content}}
        try:
            tree = apply(tree, parse(Source("edit", json.dumps(edit))))
        except GraphError:
            continue
    assert show_text(tree)


def test_a_rename_in_an_evaluation_leaves_training_what_it_can_do_without() -> None:
    tree = edited("demo_sft", "rename: {rollout_logprobs: measured}")
    assert tree.items["nodes"].items["update_policy"].get("in") is None
    tree = edited("grpo", "rename: {rollout_logprobs: measured}")
    assert tree.items["nodes"].items["update_policy"].items["in"].plain() == {"rollout_logprobs": "measured"}
