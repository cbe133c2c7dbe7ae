"""Nodes on rows of their own by a column's value, and the merge of what they write."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.printing.column_text import lineage_text
from rlgraph.reports.plan_file import parse

REWARDS = """
  - remove: [rewards]
  - set: {prompts.files: {math: [a.jsonl], code: [b.jsonl], web: [c.jsonl]}}
  - add:
      math: {op: reward.math, rows: {by: source, is: math}, out: {math: rewards}}
      exact: {op: reward.exact, rows: {by: source}, out: {exact: rewards}}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planned(edits: str = "", base: str = "grpo", devices: int = 2) -> Plan:
    Path("routed.yaml").write_text(f"graph: routed\nextends: {base}\nedits:{REWARDS}{edits}")
    plan = compile_graph("routed.yaml", devices=devices)
    assert parse(plan.json()).json() == plan.json()
    return plan


def test_a_reader_of_all_rows_gets_the_parts_merged() -> None:
    plan = planned()
    columns = plan.columns["train"]
    (merge,) = (step for step in plan.steps if step.kind == "merge")
    assert merge.writes == ("rewards",) and columns["rewards"].domain == "samples"
    assert merge.reads == ("rewards/route:math", "rewards/route:exact")
    assert all(columns[name].domain == f"samples/{name.partition('/')[2]}" for name in merge.reads)
    assert columns["advantages"].domain == "samples"


def test_a_reader_of_some_rows_gets_the_part_that_is_theirs() -> None:
    shaped = "shaped: {op: reward.sum, weight_2: 0, rows: {by: source, is: math}, out: {shaped: used}}"
    other = "other: {op: reward.sum, weight_2: 0, rows: {by: source}, out: {other: used}}"
    plan = planned(f"  - add: {{{shaped}, {other}}}\n  - set: {{advantages.in: {{rewards: used}}}}\n")
    assert plan.functions["train"]["shaped"].ins == {"rewards": "rewards/route:math"}
    assert plan.functions["train"]["other"].ins == {"rewards": "rewards/route:exact"}
    assert [step.writes for step in plan.steps if step.kind == "merge"] == [("used",)]
    assert [step.node for step in plan.steps if step.run and step.run.filters] == [
        "route:math",
        "route:exact",
    ]  # shared


def test_the_rest_is_what_the_nodes_beside_it_leave() -> None:
    functions = planned().functions["train"]
    assert functions["route:exact"].attributes["values"] == ["math"]
    assert functions["route:exact"].attributes["rest"] and not functions["route:math"].attributes["rest"]
    assert functions["route:math"].attributes["taken"] is None  # they take all rows


def test_routes_that_may_leave_a_row_refuse_it_at_run() -> None:
    functions = planned("  - set: {exact.rows: {by: source, is: code}}\n").functions["train"]
    for name in ("route:math", "route:exact"):
        assert functions[name].attributes["taken"] == ["math", "code"]


def test_a_route_of_whole_groups_is_noted_by_nobody() -> None:
    assert not [note for note in planned().notes if "cut groups" in note]


def test_a_column_is_renamed_where_a_route_goes_by_it() -> None:
    functions = planned("  - rename: {source: origin}\n").functions["train"]
    assert functions["route:exact"].ins == {"by": "origin*samples"}


def test_an_evaluation_merges_what_it_reports() -> None:
    edit = "  - add: {eval: {nodes: {rollout: {n: 1}}, report: {accuracy: rewards}}}\n"
    plan = planned(edit)
    assert [step.node for step in plan.eval_steps][-1] == "merge:rewards"


def test_a_route_is_shown_and_priced() -> None:
    Path("routed.yaml").write_text(f"graph: routed\nextends: grpo\nedits:{REWARDS}")
    settings = ["models.policy.path=Qwen/Qwen3-0.6B"]
    plan = compile_graph("routed.yaml", settings, target=Target("h100-8"))
    assert all(step.seconds for step in plan.steps)
    assert "merge the rows of rewards/route:math" in lineage_text(plan, "rewards")


UNION = """
  - remove: [ref_logprobs, models.ref, update_policy.kl_coef]
  - set: {old_logprobs.rows: [rollout, examples], update_policy.rows: [rollout, examples]}
  - add:
      examples: {op: data.examples, files: [b.jsonl], batch: 32}
      filled: {op: fill, rows: examples, value: 1, out: {filled: advantages}}
"""


def test_rows_of_two_origins_are_joined_for_one_update() -> None:
    plan = planned(UNION)
    merges = {step.writes[0]: step.reads for step in plan.steps if step.kind == "merge"}
    joined = ("tokens", "loss_mask", "advantages")
    both = {f"{name}/rollout+examples": (f"{name}/rollout", f"{name}/examples") for name in joined}
    assert {name: reads for name, reads in merges.items() if name != "rewards"} == both
    columns = plan.columns["train"]
    assert columns["old_logprobs"].domain == columns["tokens/rollout+examples"].domain
    update = next(step for step in plan.steps if step.updated)
    assert update.layout == "balanced/4" and not [name for name in update.reads if "rollout_logprobs" in name]


def test_a_union_has_the_rows_of_its_parts_in_the_work_that_is_planned() -> None:
    rows = workload(planned(UNION)).rows
    assert rows["samples:rollout+examples"] == 128 * 8 + 32


def test_a_union_follows_its_makers_names() -> None:
    plan = planned(f"{UNION}  - rename: {{rollout: generate}}\n")
    assert "tokens/generate+examples" in plan.columns["train"]


def test_laws_hold_for_the_rows_that_were_sampled() -> None:
    stale = "  - set: {update_policy.loss: {kind: reinforce}, update_policy.minibatches: 2}\n"
    with pytest.raises(GraphError, match="all but the first are off-policy"):
        planned(UNION + stale)
