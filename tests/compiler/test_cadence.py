"""When steps run: `every`, `from`, copies of weights, and what follows for versions and predictions."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.frontend.bind import bind
from rlgraph.frontend.compose import compose
from rlgraph.ir.graph import Graph
from rlgraph.ir.intervals import Cadence, Cadences, count, due, share, union, words
from rlgraph.ir.plan import Plan, Target
from rlgraph.ir.steps import Version
from rlgraph.lowering import lower
from rlgraph.planning.simulate import BrokenPlanError, simulate, steady, weighed
from rlgraph.printing.plan_diff import differences
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.plan_file import parse

APART = "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 2, by: batch}}"
DECOUPLED = "replace: {update_policy.loss: {kind: decoupled_ppo}}"
REFRESH = "add: {refresh: {op: update.copy, model: ref, of: policy@next, every: 50}}"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(base: str, *edits: str) -> str:
    body = "".join(f"  - {edit}\n" for edit in edits)
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\nedits:\n{body}")
    return "edited.yaml"


def planned(base: str, *edits: str) -> Plan:
    return compile_graph(written(base, *edits), devices=2)


def lowered(base: str, *edits: str) -> Graph:
    return lower(bind(compose(written(base, *edits)), 2))


def problem(base: str, *edits: str) -> str:
    with pytest.raises(GraphError) as caught:
        planned(base, *edits)
    (found,) = caught.value.problems
    return f"{found.kind}: {found.law}; {found.remedy}"


def when(plan: Plan) -> dict[str, str]:
    return {step.node: words(step.when) for step in plan.steps if step.when}


@pytest.mark.parametrize(
    ("cadences", "iterations"),
    [
        ((Cadence(4, 4),), {4, 8, 12}),
        ((Cadence(3, 1),), {3, 4, 5, 6, 7, 8, 9, 10, 11, 12}),
        ((Cadence(2, 5),), {2, 7, 12}),
        ((Cadence(4, 4), Cadence(6, 6)), {4, 6, 8, 12}),
        ((), set(range(1, 13))),
    ],
)
def test_the_iterations_of_a_cadence(cadences: Cadences, iterations: set[int]) -> None:
    assert {t for t in range(1, 13) if due(cadences, t)} == iterations
    assert count(cadences, 12) == len(iterations)
    assert share(cadences) == pytest.approx(sum(due(cadences, t) for t in range(601, 661)) / 60)


def test_a_union_says_no_more_than_it_must() -> None:
    assert union([[Cadence(8, 8)], [Cadence(4, 4)], [Cadence(12, 4)]]) == (Cadence(4, 4),)
    assert union([[Cadence(3, 2)], [Cadence(4, 2)]]) == (Cadence(3, 2), Cadence(4, 2))
    assert union([[Cadence(3, 2)], ()]) == ()


def test_what_leads_to_a_step_runs_when_that_does() -> None:
    plan = planned("ppo", "set: {update_policy.from: 20}")
    assert when(plan) == dict.fromkeys(["update_policy", "repartition:update_policy"], "from 20")
    imitate = "add: {imitate: {op: update.policy, model: policy, loss: {kind: sft}}}"
    plan = planned("grpo", imitate, "set: {update_policy.from: 20}")
    own = {"rewards", "old_logprobs", "ref_logprobs", "advantages", "update_policy"}
    assert own <= {*when(plan)} and not {"prompts", "rollout", "sync:policy", "imitate"} & {*when(plan)}
    assert "run ref_logprobs (logprobs) with ref@v on main[0-1], from 20\n" in plan_text(plan)


def test_a_sync_runs_with_the_rollout_that_needs_it() -> None:
    other = "add: {other: {op: rollout, model: ref, n: 1, max_new_tokens: 8, out: {tokens: t, loss_mask: m, "
    other += "rollout_logprobs: l, responses: r, group: g, truncated: c}}, clone: {op: update.policy, "
    other += "model: policy, loss: {kind: sft}, in: {tokens: t, loss_mask: m}, every: 5}}"
    assert {n: w for n, w in when(planned("grpo", other)).items() if n in ("other", "sync:ref", "clone")} == {
        "other": "every 5",
        "sync:ref": "every 5",
        "clone": "every 5",
    }


def test_what_reads_a_column_runs_when_it_is_written() -> None:
    law = (
        "misses-rows: node `update_policy` runs in every iteration; what it reads of `rewards` comes every 4"
    )
    assert problem("grpo", "set: {rewards.every: 4}").startswith(law)
    first = "set: {rollout.every: 4, rollout.from: 1}"
    other = "add: {again: {op: update.copy, model: ref, of: policy}}"
    plan = planned("grpo", first, "set: {update_policy.every: 8, update_policy.from: 1}", other)
    assert {when(plan)[node] for node in ("prompts", "sync:policy", "rollout")} == {"every 8 from 1"}


def test_intervals_are_numbers() -> None:
    assert problem("grpo", "set: {update_policy.every: 0}").startswith(
        "wrong-value: `update_policy.every` is a"
    )
    assert problem("grpo", "set: {update_policy.from: true}").startswith(
        "wrong-value: `update_policy.from` is"
    )
    accepted = problem("grpo", "set: {update_policy.evry: 3}")
    assert "did you mean `every`?" in accepted


def test_an_iteration_in_which_nothing_would_run_is_refused() -> None:
    law = "idle-iteration: in iteration 1 nothing would run: `update_policy` every 4"
    assert problem("grpo", "set: {update_policy.every: 4}").startswith(law)
    both = "set: {update_policy.every: 2, update_critic.every: 3, update_critic.from: 1}"
    assert "in iteration 3 nothing would run" in problem("ppo", both)
    planned("ppo", "set: {update_policy.every: 2, update_critic.every: 2, update_critic.from: 1}")


def test_an_update_that_begins_too_late_is_told_of() -> None:
    plan = planned("ppo", "set: {update_policy.from: 501}")
    assert "`update_policy` never runs: from 501, of 500 iterations" in plan.notes
    assert not [n for n in planned("ppo", "set: {update_policy.from: 500}").notes if "never runs" in n]


def test_versions_count_the_updates_that_ran() -> None:
    second = "add: {again: {op: update.policy, model: policy, loss: {kind: ppo_clip}, from: 3}}"
    plan = planned("ppo", second, "set: {update_policy.every: 2}")
    assert [plan.new_versions(t)["policy"] for t in range(1, 6)] == [0, 1, 1, 2, 1]
    assert [plan.new_versions(t)["critic"] for t in range(1, 6)] == [1] * 5
    assert {step.node: step.models["policy"] for step in plan.steps if step.updated == "policy"} == {
        "update_policy": "v",
        "again": "v+1",
    }
    assert [plan.since_entry("policy", Version(1), t) for t in (3, 4)] == [0, 1]
    assert [plan.since_entry("policy", Version(2), t) for t in (1, 3, 4)] == [0, 1, 2]


def test_generation_ahead_is_proved_through_a_cycle_of_updates() -> None:
    late = "set: {update_policy.every: 3, update_policy.from: 5}"
    plan = planned("ppo", APART, DECOUPLED, late)
    assert plan.steps[0].lead == 2
    seconds = {step.id: 1.0 for step in plan.steps}
    ran = [event.iteration + 1 for event in simulate(plan, seconds, 14) if event.step.node == "update_policy"]
    assert ran == [5, 8, 11, 14]
    # an update that came unforeseen would leave a rollout with weights that it is not promised
    wrong = [replace(s, when=()) if s.node == "update_policy" else s for s in plan.steps]
    moved = [n for n in plan.slot if plan.steps[n - 1].updated == "policy"]
    first = (*moved, *(n for n in plan.slot if n not in moved))
    with pytest.raises(BrokenPlanError):
        simulate(replace(plan, steps=tuple(wrong), slot=first), seconds, 14)


@pytest.mark.parametrize("seed", range(20))
def test_no_step_runs_without_what_it_reads(seed: int) -> None:
    draw = random.Random(seed)
    edits = [REFRESH.replace("every: 50", f"every: {draw.randint(1, 4)}, from: {draw.randint(1, 5)}")]
    clone = "add: {clone: {op: update.policy, model: policy, loss: {kind: sft}, every: %d, from: %d}}"
    edits += [clone % (draw.randint(1, 3), draw.randint(1, 5))] if draw.random() < 0.5 else []
    edits.append("add: {mixed: {op: filter.mixed}}\n  - set: {advantages.rows: mixed}")
    late = f"{draw.randint(1, 3)}, update_policy.from: {draw.randint(1, 4)}"
    edits.append(f"set: {{update_policy.every: {late}}}")
    edits += [APART, DECOUPLED] if draw.random() < 0.5 else []
    plan = planned("ppo", *edits)
    for iteration in range(1, 14):
        running = [step for step in plan.steps if due(step.when, iteration)]
        written = {column for step in running for column in step.writes}
        names = {step.node for step in running}
        assert all({*step.reads} <= written for step in running)
        # and nothing runs for nobody: what is written is read, but for what no step reads in any iteration
        ever = {column for step in plan.steps for column in step.reads}
        read = {column for step in running for column in step.reads}
        assert all({*step.writes} & read for step in running if {*step.writes} & ever)
        assert not {s.node for s in running if s.kind == "sync"} or "rollout" in names
    simulate(plan, {step.id: 1.0 for step in plan.steps}, 13)


def test_a_prediction_weighs_a_step_by_its_share() -> None:
    target = Target("h100-8")
    often = compile_graph("ppo", target=target).predicted
    seldom = compile_graph("ppo", ["update_policy.every=4"], target=target)
    assert often and seldom.predicted
    (step,) = [step for step in seldom.steps if step.node == "update_policy"]
    assert step.seconds
    saved = [often.seconds[grade] - seldom.predicted.seconds[grade] for grade in (0, 1)]
    for grade in (0, 1):
        assert saved[grade] >= 0.75 * step.seconds[grade]
    shares = weighed(seldom, {step.id: 1.0 for step in seldom.steps})
    by_name = {step.node: shares[step.id] for step in seldom.steps}
    assert by_name["update_policy"] == by_name["sync:policy"] == 0.25
    assert by_name["rollout"] == by_name["update_critic"] == 1.0
    assert not any(step.when for step in steady(seldom).steps)


def test_a_learning_rate_that_ends_with_the_run_counts_the_steps_that_are_made() -> None:
    cosine = "set: {models.policy.optimizer.schedule: cosine, schedule.iterations: 100}"
    plan = planned("ppo", cosine, "set: {update_policy.from: 21, update_policy.every: 2}")
    assert plan.models["policy"].optimizer
    assert plan.models["policy"].optimizer.total_steps == 4 * 40  # minibatches times updates


def test_an_evaluation_runs_whatever_the_cadence() -> None:
    plan = compile_graph("demo", ["update_policy.every=1"], devices=2)
    assert plan.eval_steps and not any(step.when for step in plan.eval_steps)


def test_plans_tell_of_a_changed_cadence() -> None:
    old, new = planned("ppo"), planned("ppo", "set: {update_policy.from: 20}")
    assert "             runs in every iteration -> runs from 20" in differences(old, new)
    assert parse(new.json()) == new


def test_a_refreshed_reference_has_versions() -> None:
    plan = planned("grpo", REFRESH)
    (step,) = [step for step in plan.steps if step.node == "refresh"]
    assert (step.updated, step.copied, dict(step.models)) == ("ref", "policy", {"ref": "v", "policy": "v+1"})
    assert "run refresh (update.copy) with ref@v of policy@v+1 on main[0-1], every 50" in plan_text(plan)
    assert step.devices == (0, 1)
    order = [s.node for s in plan.steps]
    assert order.index("ref_logprobs") < order.index("refresh") > order.index("update_policy")
    before = planned("grpo", REFRESH.replace("@next", ""))
    order = [s.node for s in before.steps]
    assert order.index("refresh") < order.index("update_policy")


def test_a_reference_that_changes_does_not_run_ahead() -> None:
    ref = "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"
    leads = {step.node: step.lead for step in planned("grpo", ref, DECOUPLED, REFRESH).steps}
    assert leads["ref_logprobs"] == leads["refresh"] == 0 < leads["rollout"]


def test_a_copy_fits_and_is_priced_on_a_cluster() -> None:
    plan = compile_graph(written("grpo", REFRESH), target=Target("h100-8"))
    (step,) = [step for step in plan.steps if step.node == "refresh"]
    assert step.seconds and step.bytes and step.bytes > 1e8


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("add: {r: {op: update.copy, model: ref}}", "does not say whose weights; add `of: MODEL`"),
        ("add: {r: {op: update.copy, model: ref, of: polcy}}", "no model `polcy`; did you mean `policy`?"),
        (
            "add: {r: {op: update.copy, model: policy, of: ref}}",
            "onto model `policy`, which is trained",
        ),
        ("add: {r: {op: update.copy, model: ref, of: ref@next}}", "copies `ref` onto itself"),
        ("add: {r: {op: update.copy, model: ref, of: policy, mix: 2}}", "must be less than or equal to 1"),
        ("set: {update_policy.of: ref}", "copies no weights; remove `of`"),
    ],
)
def test_a_copy_of_nothing_that_could_be_copied_is_refused(edit: str, said: str) -> None:
    assert said in problem("grpo", edit)


def test_heads_and_pools_of_a_copy_must_match() -> None:
    value = (
        "add: {models.old: {path: m, head: value, frozen: true}, r: {op: update.copy, model: old, of: %s}}"
    )
    assert "`policy`, which has head lm, onto `old`, which has value" in problem("ppo", value % "policy")
    planned("ppo", value % "critic")
    apart = "set: {pools: {train: {devices: 1}, side: {devices: 1}}, models.ref.train.pool: side}"
    said = problem("grpo", apart, REFRESH)
    assert said.startswith("copy-between-pools") and said.endswith("models.ref.train.pool=train")


def test_a_renamed_model_is_copied_under_its_new_name() -> None:
    graph = lowered("grpo", REFRESH, "rename: {models.policy: actor}")
    assert graph.node("refresh").of == "actor"
