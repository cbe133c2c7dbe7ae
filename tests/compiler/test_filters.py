"""Filters: a part of a domain, and the selections that bring columns into it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan

FILTER = "add: {informative: {op: filter.mixed}}"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planned(*edits: str, base: str = "grpo", devices: int = 2) -> Plan:
    body = "".join(f"  - {edit}\n" for edit in edits)
    Path("filtered.yaml").write_text(f"graph: filtered\nextends: {base}\nedits:\n{body}")
    return compile_graph("filtered.yaml", devices=devices)


def test_a_curriculum_is_a_filter_of_prompts_with_a_course() -> None:
    """As in docs/data.md."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (block,) = re.findall(r"```python\n(@op.*?)```", page, re.DOTALL)
    Path("my_ops.py").write_text("from rlgraph.ops import boolean, op, prompts, text\n\n\n" + block)
    edits = re.search(r"## A curriculum.*?```yaml\n  - (add.*?)\n  - (.*?)\n```", page, re.DOTALL)
    assert edits
    plan = planned(*edits.groups())
    assert plan.functions["train"]["easy"].courses["most"].at(101) == 550
    assert plan.columns["train"]["tokens"].domain.startswith("samples")
    (collect,) = [step for step in plan.steps if step.kind == "collect"]
    assert collect.after and "until 128 rows stay" in collect.because


def selected(plan: Plan) -> set[str]:
    return {step.writes[0] for step in plan.steps if step.kind == "select"}


def test_what_reads_a_filters_rows_gets_them_and_so_does_what_reads_that() -> None:
    plan = planned(FILTER, "set: {advantages.rows: informative}")
    columns = plan.columns["train"]
    assert columns["advantages"].domain == columns["tokens/informative"].domain == "samples/informative"
    assert columns["old_logprobs"].domain == "samples"
    # the update reads advantages, which have only these rows: everything else that it reads is selected
    assert selected(plan) == {
        f"{name}/informative"
        for name in (
            "rewards",
            "group",
            "loss_mask",
            "tokens",
            "rollout_logprobs",
            "old_logprobs",
            "ref_logprobs",
        )
    }
    reads = next(step.reads for step in plan.steps if step.node == "update_policy")
    assert all("/informative" in name or name.startswith("advantages") for name in reads)


def test_scores_of_the_kept_rows_alone_are_computed_where_the_graph_says_so() -> None:
    rows = ("advantages", "old_logprobs", "ref_logprobs")
    plan = planned(FILTER, *(f"set: {{{name}.rows: informative}}" for name in rows))
    assert plan.columns["train"]["old_logprobs"].domain == "samples/informative"
    assert "old_logprobs/informative" not in selected(plan)


def test_a_filter_of_a_filter() -> None:
    plan = planned(
        FILTER,
        "add: {again: {op: filter.mixed, min_std: 0.5, rows: informative}}",
        "set: {advantages.rows: again}",
    )
    assert plan.columns["train"]["advantages"].domain == "samples/informative/again"
    # a column goes through both, domain by domain
    assert {"rewards/informative", "rewards/informative/again"} <= selected(plan)


def test_a_prompts_column_is_repeated_and_then_selected() -> None:
    plan = planned(FILTER, "add: {again: {op: reward.exact, rows: informative}}",
                   "set: {advantages: {op: advantage.grpo, in: {rewards: again}}}")  # fmt: skip
    assert "answer*samples" in plan.columns["train"]
    assert "answer*samples/informative" in selected(plan)


def test_rows_stay_where_the_filter_saw_them() -> None:
    plan = planned(FILTER, "set: {advantages.rows: informative}", devices=3)
    layouts = {step.layout for step in plan.steps if step.kind == "select" or (step.run and step.run.filters)}
    assert layouts == {"even"}


def test_a_filter_that_nobody_uses_is_pruned() -> None:
    assert "informative" not in [step.node for step in planned(FILTER).steps]


@pytest.mark.parametrize(
    ("edits", "kind", "said"),
    [
        (["set: {advantages.rows: informativ}"], "no-filter", "did you mean `informative`?"),
        (["set: {advantages.rows: rewards}"], "no-filter", "the filters are informative"),
        (["set: {prompts.rows: informative}"], "rows-of-a-source", "makes its own rows"),
        (["set: {advantages.rows: 3}"], "wrong-type", "names a filter"),
        (["set: {rewards.rows: informative}"], "cycle", "nodes wait for each other"),
        (
            [
                "add: {other: {op: filter.mixed}}",
                "set: {advantages.rows: informative, old_logprobs.rows: other}",
            ],
            "unrelated-domains",
            "unrelated domains",
        ),
    ],
)
def test_what_is_refused(edits: list[str], kind: str, said: str) -> None:
    with pytest.raises(GraphError) as caught:
        planned(FILTER, *edits)
    assert kind in [problem.kind for problem in caught.value.problems]
    assert said in str(caught.value)


def test_a_filter_of_single_rows_may_cut_groups_and_the_plan_says_so() -> None:
    row = "add: {good: {op: filter.threshold, min: 0.5}}"
    (note,) = planned(row, "set: {advantages.rows: good}").notes
    assert note == "`good` may cut groups: `advantages` compares what is left of them"
    assert not planned(FILTER, "set: {advantages.rows: informative}").notes
