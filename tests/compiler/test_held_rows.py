"""Rows that last: which columns are held, what laws they are under, and that remedies of errors work."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.intervals import words
from rlgraph.ir.plan import Plan, Target
from rlgraph.printing.column_text import lineage_text
from rlgraph.printing.plan_text import plan_text

GROW = "set: {rollout.every: 5, rollout.from: 1}"
KEPT = "add: {kept: {op: replay, rows: rollout, fresh: true, capacity: 1024, staleness: 4}}"
AGAIN = "add: {again: {op: replay, rows: rollout, capacity: 2048, staleness: 4, batch: 256}}"
OF_KEPT = "set: {update_policy.rows: kept}"
OF_BOTH = "set: {update_policy.rows: [rollout, again]}"
BEFORE = "set: {advantages.rows: rollout}"
COPY = "add: {copy: {op: update.copy, model: ref, of: policy}}"  # so that each iteration has something to do
RATIO = "set: {update_policy.in.old_logprobs: rollout_logprobs}"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(base: str, *edits: str) -> str:
    body = "".join(f"  - {edit}\n" for edit in edits)
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\nedits:\n{body}")
    return "edited.yaml"


def planned(base: str, *edits: str) -> Plan:
    return compile_graph(written(base, *edits), ["prompts.files=[a.jsonl]"], devices=2)


def problem(base: str, *edits: str) -> str:
    with pytest.raises(GraphError) as caught:
        planned(base, *edits)
    (found,) = {*caught.value.problems}
    return f"{found.kind}: {found.law}; {found.remedy}"


def held(plan: Plan, node: str) -> list[str]:
    return [*plan.functions["train"][node].holds]


def when(plan: Plan, node: str) -> str:
    (step,) = (step for step in plan.steps if step.node == node)
    return words(step.when)


def test_what_is_read_of_the_rows_is_held() -> None:
    plan = planned("grpo", GROW, KEPT, OF_KEPT)
    of_tokens = ["advantages", "loss_mask", "old_logprobs", "ref_logprobs", "rollout_logprobs", "tokens"]
    assert held(plan, "kept") == of_tokens
    plan = planned("grpo", GROW, KEPT, OF_KEPT, "set: {ref_logprobs.rows: kept}")
    assert held(plan, "kept") == [name for name in of_tokens if name != "ref_logprobs"]
    text = plan_text(plan)
    assert "holds   at most 1,024 rows, and gives those of 0 to 4 iterations before" in text
    assert "samples:kept, rows of samples that `kept` holds" in lineage_text(plan, "tokens/kept")


def test_all_that_leads_to_rows_runs_when_they_come_and_the_rest_in_every_iteration() -> None:
    plan = planned("grpo", GROW, KEPT, OF_KEPT, "set: {ref_logprobs.rows: kept}")
    seldom = [
        "prompts",
        "sync:policy",
        "rollout",
        "rewards",
        "advantages",
        "old_logprobs",
        "repartition:kept",
    ]
    assert {when(plan, node) for node in seldom} == {"every 5 from 1"}
    assert {when(plan, node) for node in ("kept", "ref_logprobs", "update_policy")} == {""}
    third = "set: {update_policy.every: 3, update_policy.from: 1}"
    plan = planned("grpo", GROW, KEPT, OF_KEPT, third, COPY)
    assert when(plan, "kept") == "every 3 from 1 and every 5 from 1"  # it misses no rows
    plan = planned("grpo", "set: {prompts.every: 5, prompts.from: 1}", KEPT, OF_KEPT)
    assert {when(plan, node) for node in seldom} == {"every 5 from 1"}


def test_an_evaluation_runs_whole() -> None:
    report = "add: {eval: {nodes: {rollout: {n: 1}}, report: {accuracy: rewards}}}"
    plan = planned("grpo", GROW, KEPT, OF_KEPT, report)
    assert {step.when for step in plan.eval_steps} == {()}
    assert "rollout" in {step.node for step in plan.eval_steps}


def test_rows_that_a_filter_keeps_are_held_with_columns_of_their_prompts() -> None:
    mixed = "add: {mixed: {op: filter.mixed, refill: true}}"
    some = "set: {advantages.rows: mixed, again.rows: mixed, update_policy.rows: [mixed, again]}"
    scored = (
        "add: {scored: {op: reward.exact, rows: again}, told: {op: filter.threshold, in: {rewards: scored}, "
    )
    scored += "min: 0.5}}"
    plan = planned("grpo", mixed, AGAIN, some, RATIO, scored, "set: {update_policy.rows: [mixed, told]}")
    assert {"tokens", "answer", "responses"} <= {*held(plan, "again")}
    assert plan.domains["train"]["samples:again"].held == "samples/mixed"
    assert plan.columns["train"]["answer/again"].type == "text[samples]"


def test_rows_that_were_sampled_by_older_weights_ask_for_a_correction_by_the_same_words() -> None:
    both = "set: {old_logprobs.rows: [rollout, again]}"
    told = problem("grpo", AGAIN, OF_BOTH, both)
    assert told.startswith("stale-ratio: ") and "the rows are sampled by policy@v-4" in told
    planned("grpo", AGAIN, OF_BOTH)  # old_logprobs is held: that of the weights that sampled
    planned("grpo", AGAIN, OF_BOTH, both, RATIO)
    planned("grpo", AGAIN, OF_BOTH, both, "add: {rollout_weights: {op: correction.tis}}")
    planned("grpo", AGAIN, OF_BOTH, both, "replace: {update_policy.loss: {kind: decoupled_ppo}}")
    weights = "add: {rollout_weights: {op: correction.tis, rows: rollout, in: {old_logprobs: first}}, "
    weights += "first: {op: logprobs, model: policy, rows: rollout}}"
    told = problem("grpo", AGAIN, OF_BOTH, both, weights)  # they bring rows to the weights of when they came
    assert told.startswith("stale-ratio: ")
    planned("grpo", AGAIN, OF_BOTH, both, weights, told.rpartition("; ")[2], "remove: [first]")


def test_rows_that_are_as_old_as_generation_leads_are_older_still() -> None:
    apart = (
        "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"
    )
    both = "set: {old_logprobs.rows: [rollout, again]}"
    assert "the rows are sampled by policy@v-5" in problem("grpo", apart, AGAIN, OF_BOTH, both)
    plan = planned("grpo", apart, GROW, KEPT, OF_KEPT, RATIO)
    assert when(plan, "rollout") == "every 5 from 1"


def test_a_loss_without_a_ratio_is_off_policy_and_its_remedy_helps() -> None:
    once = ("set: {update_policy.minibatches: 1}", "replace: {update_policy.loss: {kind: reinforce}}")
    edits = (AGAIN, *once, "set: {update_policy.rows: again, again.fresh: true}")
    told = problem("grpo", *edits, "remove: [old_logprobs, ref_logprobs, update_policy.kl_coef]")
    law, _, remedy = told.partition("; its rows are sampled by policy@v-4, and it updates policy@v; ")
    assert law.startswith("off-policy: ") and "rows: again" in remedy
    planned("grpo", *edits, "remove: [old_logprobs, ref_logprobs, update_policy.kl_coef]", remedy)


@pytest.mark.parametrize(
    ("kind", "edits", "remedy"),
    [
        ("misses-rows", (GROW,), (KEPT, OF_KEPT)),
        ("misses-rows", (GROW, COPY), ("set: {update_policy.every: 5, update_policy.from: 1}",)),
        (
            "no-rows-held",
            ("set: {rollout.every: 5}", KEPT, OF_KEPT, "set: {kept.fresh: false, kept.staleness: 2}"),
            ("set: {kept.fresh: true, kept.staleness: 4, rollout.from: 1}",),
        ),
        ("no-rows-held", (GROW, KEPT, OF_KEPT, "set: {kept.staleness: 3}"), ("set: {kept.staleness: 4}",)),
        ("no-union", (KEPT, "set: {update_policy.rows: [rollout, kept]}"), ("set: {kept.fresh: false}",)),
        ("held-groups", (KEPT, OF_KEPT, "set: {advantages.rows: kept}"), (BEFORE,)),
    ],
)
def test_remedies_help(kind: str, edits: tuple[str, ...], remedy: tuple[str, ...]) -> None:
    told = problem("grpo", *edits)
    assert told.startswith(f"{kind}: ")
    assert all(edit in told.replace("and set", "set") for edit in remedy)
    planned("grpo", *edits, *remedy)


def test_memory_of_held_rows_is_planned() -> None:
    sizes = [f"models.{name}.path=Qwen/Qwen2.5-0.5B-Instruct" for name in ("policy", "ref")]
    path = written("grpo", AGAIN, OF_BOTH, RATIO)
    plan = compile_graph(path, ["prompts.files=[a.jsonl]", *sizes], target=Target("h100-8"))
    assert plan.predicted
    (said,) = (line for line in plan.predicted.assumed if "again holds" in line)
    assert said == "the rows that again holds take 33 MB of its host"
    huge = ["prompts.files=[a.jsonl]", "again.capacity=1000000000", *sizes]
    with pytest.raises(GraphError, match="does not fit"):
        compile_graph(path, huge, target=Target("h100-8"))
