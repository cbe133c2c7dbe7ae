"""Filters that refill: the region before them, what it refuses, and what a plan says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.memory import Footprint
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan
from rlgraph.lowering import plan_tree
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports import plan_file
from rlgraph.syntax.source import Source, parse

GRAPH = """
graph: small
models:
  policy: {path: a/b, optimizer: {lr: 1e-4}}
schedule: {iterations: 3}
nodes:
  prompts: {op: data.prompts, files: [a.jsonl], batch: 8}
  rollout: {op: rollout, model: policy, n: 4, max_new_tokens: 8}
  rewards: {op: reward.exact}
  mixed: {op: filter.mixed, refill: true}
  old_logprobs: {op: logprobs, model: policy, rows: mixed}
  advantages: {op: advantage.grpo, rows: mixed}
  update_policy: {op: update.policy, model: policy, minibatches: 2, loss: {kind: ppo_clip}}
"""
AHEAD = "{iterations: 3, buffer: {staleness: 1, by: batch}}\npools: {train: {devices: 1}, gen: {devices: 1}}"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def changed(*changes: tuple[str, str]) -> str:
    text = GRAPH
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def planned(text: str = GRAPH, devices: int = 1) -> Plan:
    return plan_tree(parse(Source("small.yaml", text)), devices)


def test_the_plan(golden: Callable[[str, str], None]) -> None:
    golden("plan/refill-2.txt", plan_text(planned(devices=2)))


@pytest.mark.parametrize("devices", [1, 2])
def test_the_steps_of_a_region_stand_together_in_front_of_what_collects_their_rows(devices: int) -> None:
    steps = planned(devices=devices).steps
    at = [index for index, step in enumerate(steps) if step.region == "mixed"]
    assert at == list(range(at[0], at[-1] + 1)) and steps[at[-1]].kind == "collect"
    assert [steps[index].node for index in at if steps[index].op] == [
        "prompts",
        "rollout",
        "rewards",
        "mixed",
    ]
    assert [step.node for step in steps if step.kind == "sync"] == [steps[at[0] - 1].node]
    assert not [step for step in steps if step.kind == "select"]


def test_what_a_plan_says_of_a_region_is_data_too() -> None:
    plan = planned(changed(("refill: true", "refill: {rows: 24, rounds: 5}")))
    region = plan.regions["mixed"]
    assert (region.source, region.kind, region.rows, region.times) == ("prompts", "prompts", 24, 4)
    assert "repeat steps 2 to 6 until 24 rows stay, at most 5 rounds" in plan_text(plan)
    data = json.loads(plan.json())
    assert data["regions"]["mixed"]["rounds"] == 5
    assert plan_file.parse(plan.json()) == plan


def test_without_refill_rows_are_selected_and_an_evaluation_never_refills() -> None:
    kinds = [step.kind for step in planned(changed(("refill: true", "refill: false"))).steps]
    assert "select" in kinds and "collect" not in kinds
    kept = "eval: {nodes: {scored: {op: reward.exact, rows: mixed}}, report: {kept: scored}}"
    plan = planned(GRAPH + kept)
    assert "select" in {step.kind for step in plan.eval_steps}
    assert "collect" in {step.kind for step in plan.steps}
    assert not any(step.region for step in plan.eval_steps)


REFUSED = [
    ("refill-of-no-filter", [("op: reward.exact", "op: reward.exact, refill: true")], "is not a filter"),
    ("unknown-attribute", [("refill: true", "refill: {row: 3}")], "did you mean `rows`?"),
    ("wrong-value", [("refill: true", "refill: {expected: 0}")], "must be greater than 0"),
    ("no-file", [("{iterations: 3}", "{iterations: 3, buffer: {order: 'mine.py:first'}}")], "there is no"),
    ("unknown-policy", [("{iterations: 3}", "{iterations: 3, buffer: {order: 'own.py:frst'}}")],
      "did you mean `first`?"),
    ("no-batch", [("batch: 8", "batch: all")], "set: {prompts.batch: 128}"),
    ("cut-groups", [("refill: true", "refill: {rows: 30}")], "set: {mixed.refill.rows: 28}"),
    ("before-refill", [("policy, rows: mixed}", "policy}"), ("advantages: {op: advantage.grpo, rows: mixed}",
      "advantages: {op: advantage.grpo}\n  other: {op: advantage.grpo, rows: mixed}\n  more: {op: "
      "update.policy, model: policy, in: {advantages: other}, loss: {kind: ppo_clip}}")], ".rows: mixed}"),
    ("two-regions", [("  old_logprobs:",
      "  again: {op: filter.mixed, rows: mixed, refill: true}\n  old_logprobs:"),
      ("advantage.grpo, rows: mixed", "advantage.grpo, rows: again"),
      ("policy, rows: mixed}", "policy, rows: again}")], "set: {mixed.refill: false}"),
    ("two-partial", [("op: rollout, model: policy, n: 4, max_new_tokens: 8}",
      "op: rollout.partial, model: policy, n: 4, max_new_tokens: 8, chunk: 4}\n  one: {op: rollout.partial, "
      "model: policy, n: 1, max_new_tokens: 8, chunk: 4, out: {tokens: t, loss_mask: l, rollout_logprobs: p, "
      "token_versions: v, responses: greedy, group: g, truncated: d}}\n  best: {op: reward.exact, in: "
      "{responses: greedy}}\n  both: {op: reward.sum, in: {rewards_2: best}}"),
      ("op: advantage.grpo,", "op: advantage.grpo, in: {rewards: both},")], "replace: {one: {op: rollout"),
    ("region-ahead", [("{iterations: 3}", AHEAD), ("policy, rows: mixed}", "policy}"),
      ("kind: ppo_clip", "kind: decoupled_ppo")], "set: {old_logprobs.rows: mixed}"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "said"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_cannot_be_repeated_is_refused(kind: str, changes: list[tuple[str, str]], said: str) -> None:
    Path("own.py").write_text("def first(waiting, wanted): return [0]")
    with pytest.raises(GraphError) as caught:
        planned(changed(*changes))
    assert kind in {problem.kind for problem in caught.value.problems}, caught.value
    assert said in str(caught.value)


def test_rows_that_wait_are_older_and_a_loss_has_to_correct_for_them() -> None:
    waiting = ("{iterations: 3}", "{iterations: 3, buffer: {staleness: 2}}")
    with pytest.raises(GraphError, match=r"sampled by policy@v-2") as caught:
        planned(changed(waiting))
    assert "set: {update_policy.in.old_logprobs: rollout_logprobs}" in str(caught.value)
    assert planned(changed(waiting, ("minibatches: 2,", "in: {old_logprobs: rollout_logprobs},")))
    # log-probs that are taken when a row is sampled wait with it, and are of the weights that sampled
    assert planned(changed(waiting, ("policy, rows: mixed}", "policy}")))


def test_a_region_runs_ahead_as_one_piece() -> None:
    ahead = changed(("{iterations: 3}", AHEAD), ("minibatches: 2,", "in: {old_logprobs: rollout_logprobs},"))
    plan = planned(ahead, devices=2)
    assert {step.lead for step in plan.steps if step.region} == {1}
    at = [place for place, number in enumerate(plan.slot) if plan.steps[number - 1].region]
    assert at == list(range(at[0], at[-1] + 1))


def test_predictions_take_the_share_that_is_expected_to_stay() -> None:
    work = workload(planned(changed(("refill: true", "refill: {expected: 0.25}"))))
    assert (work.rows["prompts"], work.rows["samples"], work.rows["samples/mixed"]) == (32, 128, 32)
    assert any("but mixed 25% (refill.expected)" in line for line in work.assumed)


def test_engines_stay_where_they_are_between_two_rounds() -> None:
    plan = compile_graph("dapo", devices=8)
    footprint = Footprint(plan, load_cluster("h100-8"), workload(plan), sizes_of(plan))
    needs = [footprint.needs("main", step) for step in plan.steps if step.region]
    assert needs and all(need == needs[0] for need in needs)
    assert ("policy", "serve", "weights") in needs[0]


def test_where_generation_streams_the_rows_of_a_rollout_are_those_that_have_finished() -> None:
    pools = "pools={train: {devices: 1}, gen: {devices: 1}}"
    plan = compile_graph("replay", [pools, "schedule.buffer={}"], 0)
    held = next(step for step in plan.steps if step.node == "replayed")
    assert held.reads and all(column.partition("/")[2] == "finished" for column in held.reads[:2])
    inside = {step.node for step in plan.steps if step.region == "finished" and not step.inserted}
    assert inside == {"prompts", "rollout", "rewards", "finished"}
