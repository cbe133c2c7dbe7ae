"""The watchdog: when each rule speaks up and when it does not, what it proposes, and where a run says it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Plan
from rlgraph.printing.alarm import alarm_text
from rlgraph.reports.report import make_report, report_text
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.watchdog import Rule, Watchdog, rules
from rlgraph.syntax.settings import Buffer

HERE = Path(__file__).parent
ONES = str(HERE / "ones.yaml")
RULES = rules()
DOCS = HERE.parents[1] / "docs" / "tuning.md"
Line = dict[str, Any]

# Metrics of iteration 300 of a run of grpo on sums of two digits, and of what began it: nothing is wrong.
BEGAN = {
    "reward/mean": 0.24,
    "reward/std": 0.43,
    "reward/unparsed": 0.01,
    "keep/kept": 0.6,
    "rollout/length": 120.0,
    "rollout/truncated": 0.02,
    "rollout/repetitive": 0.0,
    "rollout/tool_errors": 0.2,
    "update_policy/entropy": 0.58,
    "update_policy/no_advantage": 0.4,
    "update_policy/rollout_gap": 0.001,
    "update_policy/rollout_kl": 0.001,
    "update_policy/kl_ref": 0.003,
    "update_policy/clip_fraction": 0.01,
    "update_policy/ratio": 1.0,
    "update_policy/skipped": 0,
    "update_critic/clip_fraction": 0.5,
    "update_critic/explained_variance": 0.3,
    "perf/speed/gen-0": 1.05,
    "perf/speed/gen-1": 0.95,
}
WELL = BEGAN | {"reward/mean": 0.58, "update_policy/entropy": 0.27, "update_policy/kl_ref": 0.25}
# What goes wrong in a run, by the rule that says so: metrics from some iteration on.
WRONG: Mapping[str, Mapping[str, float]] = {
    "reward-flat": {"reward/mean": 0.0, "reward/std": 0.0},
    "kept-nothing": {"keep/kept": 0.0},
    "groups-alike": {"update_policy/no_advantage": 0.95},
    "answers-unread": {"reward/unparsed": 0.97},
    "cut-off": {"rollout/truncated": 0.8},
    "entropy-gone": {"update_policy/entropy": 0.01},
    "entropy-rising": {"update_policy/entropy": 4.5, "reward/mean": 0.1},
    "length-gone": {"rollout/length": 10.0, "reward/mean": 0.2},
    "repetition": {"rollout/repetitive": 0.4},
    "engines-apart": {"update_policy/rollout_gap": 0.08},
    "rows-old": {"update_policy/rollout_kl": 0.08},
    "reference-left": {"update_policy/kl_ref": 3.0},
    "clipped": {"update_policy/clip_fraction": 0.4},
    "steps-skipped": {"update_policy/skipped": 2},
    "critic-lost": {"update_critic/explained_variance": -0.2},
    "tools-fail": {"rollout/tool_errors": 0.9},
    "worker-slow": {"perf/speed/gen-1": 0.4},
}
# What looks like it and is not.
NEARLY: Mapping[str, Mapping[str, float]] = {
    "groups-alike": {"update_policy/no_advantage": 1.0, "reward/std": 0.0, "reward/mean": 1.0},  # reward-flat
    "entropy-gone": {"update_policy/entropy": 0.01, "reward/std": 0.1, "reward/mean": 0.99},  # solved
    "entropy-rising": {"update_policy/entropy": 4.5},  # and earns more
    "length-gone": {"rollout/length": 10.0},  # shorter and better
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PPO with a filter."""
    path = tmp_path_factory.mktemp("graph") / "filtered.yaml"
    edits = (
        "set: {update_policy.kl_coef: 0.01}",
        "add: {keep: {op: filter.mixed}}",
        "set: {shaped.rows: keep}",
    )
    path.write_text("graph: filtered\nextends: ppo\nedits:\n" + "".join(f"  - {edit}\n" for edit in edits))
    return str(path)


@pytest.fixture(scope="module")
def plan(graph: str) -> Plan:
    return compile_graph(graph, (), 1)


def stale(plan: Plan) -> Plan:
    """The same, as if its updates had rows of older weights."""
    return replace(
        plan, schedule=plan.schedule.model_copy(update={"buffer": Buffer(staleness=2, by="batch")})
    )


def lines(wrong: Mapping[str, float], count: int = 40) -> Iterator[Line]:
    """A run in which all is well, and then something is not, for so many iterations."""
    every = chain(10 * [BEGAN], 20 * [WELL], count * [WELL | dict(wrong)])
    return ({"step": step, **values} for step, values in enumerate(every, 1))


def said(plan: Plan, every: Iterator[Line]) -> list[dict[str, Any]]:
    watchdog = Watchdog(plan)
    return [alarm for line in every for alarm in watchdog.add(line)]


def test_it_is_silent_while_all_is_well(plan: Plan) -> None:
    assert said(plan, lines({})) == []
    assert {rule.name for rule in RULES} == WRONG.keys(), "each rule has a run that it is tried on"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_speaks_once_after_so_many_iterations_in_a_row(rule: Rule, plan: Plan) -> None:
    wrong = WRONG[rule.name]
    plan = stale(plan) if rule.stale else plan
    alarms = {alarm["rule"]: alarm for alarm in said(plan, lines(wrong))}
    assert alarms[rule.name]["step"] == 30 + rule.times
    assert alarms.keys() - {rule.name} <= {"groups-alike"} or rule.name == "reward-flat"
    assert said(plan, lines(wrong, rule.times - 1)) == []
    torn = ({**line, **(WELL if line["step"] % rule.times == 0 else {})} for line in lines(wrong))
    assert said(plan, torn) == [], "what passes is no alarm"
    unmeasured = ({n: v for n, v in line.items() if n not in wrong} for line in lines(wrong))
    assert said(plan, unmeasured) == []
    if rule.name in NEARLY:
        assert rule.name not in {alarm["rule"] for alarm in said(plan, lines(NEARLY[rule.name]))}


def test_iterations_that_measure_nothing_of_a_rule_do_not_interrupt_it(plan: Plan) -> None:
    """A rollout or an update that runs every other iteration is watched too."""
    rare = {"reward/std", "reward/mean", "rollout/truncated", "update_policy/clip_fraction"}
    wrong = {"reward/std": 0.0, "rollout/truncated": 0.9, "update_policy/clip_fraction": 0.5}
    every = (
        {name: v for name, v in line.items() if line["step"] % 2 or name not in rare} for line in lines(wrong)
    )
    alarms = {alarm["rule"]: alarm["step"] for alarm in said(plan, every)}
    assert alarms == {"reward-flat": 49, "cut-off": 49, "clipped": 49}


def test_rewards_of_one_node_that_are_alike_are_no_flat_reward(plan: Plan) -> None:
    others = ({**line, "formatted/reward/std": 0.5} for line in lines({"reward/std": 0.0}))
    assert said(plan, others) == []
    others = ({**line, "formatted/reward/std": 0.0} for line in lines({"reward/std": 0.0}))
    assert [alarm["rule"] for alarm in said(plan, others)] == ["reward-flat"]


def test_a_coefficient_that_changes_over_the_run_is_not_proposed_as_a_number() -> None:
    setting = "update_policy.kl_coef={linear: [0.1, 0.01], over: 100}"
    (alarm,) = said(compile_graph("ppo", (setting,), 1), lines(WRONG["reference-left"]))
    assert alarm["edits"] == ["models.policy.optimizer.lr=5e-07"]
    rate = "models.policy.optimizer.lr={linear: [1e-6, 1e-7], over: 100}"
    (alarm,) = said(compile_graph("ppo", (setting, rate), 1), lines(WRONG["reference-left"]))
    assert alarm["edits"] == []


def test_what_is_no_number_counts_for_nothing(plan: Plan) -> None:
    assert said(plan, ({"step": n, "reward/std": float("nan"), "reward/mean": None} for n in range(40))) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_it_proposes_can_be_typed(rule: Rule, plan: Plan, graph: str) -> None:
    every = said(stale(plan) if rule.stale else plan, lines(WRONG[rule.name]))
    (alarm,) = (alarm for alarm in every if alarm["rule"] == rule.name)
    assert len(alarm["edits"]) == len(rule.edits) - SET.count(rule.name) and "{" not in alarm["law"]
    for edit in alarm["edits"]:
        now = compile_graph(graph, (edit,), 1)
        assert now.json() != plan.json(), f"{edit} changes the plan"
        assert edit in alarm_text(alarm)


# rules of whose settings this graph has one already: temperature, epochs, aggregate, serve.dtype
SET = ["groups-alike", "clipped", "length-gone", "engines-apart"]


def test_what_older_weights_explain_is_no_difference_of_engines(plan: Plan, in_demo: None) -> None:
    wrong = WRONG["engines-apart"] | WRONG["rows-old"]
    assert [alarm["rule"] for alarm in said(plan, lines(wrong))] == ["engines-apart"]
    assert [alarm["rule"] for alarm in said(stale(plan), lines(wrong))] == ["rows-old"]
    graph, note = str(HERE / "learned.yaml"), "rollout_weights.note=note"
    streamed = compile_graph(graph, (note,), 2)
    assert [alarm["rule"] for alarm in said(streamed, lines(wrong))] == ["rows-old"]
    at_once = compile_graph(graph, (note, "schedule.buffer.staleness=0"), 2)
    assert [alarm["rule"] for alarm in said(at_once, lines(wrong))] == ["engines-apart"]


def test_settings_that_another_graph_has_not_are_proposed() -> None:
    other = ("rollout.temperature=0.7", "update_policy.epochs=2")
    other += ("models.policy.train.dtype=bfloat16", "update_policy.aggregate=token-sum")
    graph = compile_graph("ppo", other, 1)
    edits = {alarm["rule"]: alarm["edits"] for name in SET for alarm in said(graph, lines(WRONG[name]))}
    assert edits["groups-alike"] == ["rollout.n=8", "rollout.temperature=1.0"]
    assert "update_policy.epochs=1" in edits["clipped"]
    assert "update_policy.aggregate=token-mean" in edits["length-gone"]
    assert edits["engines-apart"] == ["models.policy.serve.dtype=bfloat16"]


def test_more_rows_are_drawn_only_where_a_filter_can_draw_them(plan: Plan) -> None:
    nothing = {"informative/kept": 0.0}
    (alarm,) = said(compile_graph("dapo", (), 1), lines(nothing))
    assert alarm["rule"] == "kept-nothing" and alarm["edits"] == [], "it draws more rows already"
    (alarm,) = said(compile_graph("rest", (), 1), lines({"correct/kept": 0.0}))
    assert alarm["edits"] == [], "rows that are held come from no source"
    (alarm,) = said(plan, lines({"keep/kept": 0.0}))
    assert alarm["law"].endswith(": `keep/kept`")


def test_settings_follow_from_what_the_graph_has(plan: Plan) -> None:
    edits = {alarm["rule"]: alarm["edits"] for rule in WRONG.values() for alarm in said(plan, lines(rule))}
    assert edits["cut-off"] == ["rollout.max_new_tokens=2048"]
    assert edits["reference-left"] == ["update_policy.kl_coef=0.04", "models.policy.optimizer.lr=5e-07"]
    assert edits["critic-lost"] == ["models.critic.optimizer.lr=3e-05"]
    assert edits["reward-flat"] == ["rollout.n=8"]


def test_the_documents_have_each_rule() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for rule in RULES:
        when = rule.when.replace("speed/*", "speed/POOL-DEVICE").replace("*", "NODE")
        assert f"| `{rule.name}` | `{when}` | {rule.times} |" in text


def test_a_run_that_can_learn_nothing_is_told_so_once(
    in_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = ("schedule.iterations=12", "prompts.batch=2", "rollout.n=2", "rollout.max_new_tokens=2")
    settings = (
        *flat,
        f"rewards={{op: '{HERE / 'ones_ops.py'}:ones', per: 1000000000}}",
        "schedule.save_every=11",
    )
    run_graph(ONES, settings, 1, run_dir=Path("flat"), inline=True)
    printed = capsys.readouterr().out
    alarms = [json.loads(line) for line in Path("flat/alarms.jsonl").read_text().splitlines()]
    flats = [alarm for alarm in alarms if alarm["rule"] == "reward-flat"]
    assert [alarm["step"] for alarm in flats] == [10] and flats[0]["edits"] == ["rollout.n=4"]
    assert printed.count("note: after iteration 10: all samples earn the same reward") == 1
    # gone on with, it is not said again; gone back behind it, it is
    run_graph(ONES, (*settings, "schedule.iterations=13"), 1, run_dir=Path("flat"), inline=True, resume=True)
    assert "all samples earn the same" not in capsys.readouterr().out
    assert len(Path("flat/alarms.jsonl").read_text().splitlines()) == len(alarms)
    report = make_report(Path("flat"))
    assert [*report.alarms] == alarms and json.loads(report.json())["alarms"] == alarms
    assert all(alarm_text(alarm).replace("\n", "\n  ") in report_text(report) for alarm in alarms)


def test_a_run_that_learns_is_told_no_more_than_that_its_responses_are_cut_off(
    in_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("schedule.iterations=12", "prompts.batch=4", "rollout.max_new_tokens=4", "rollout.n=4")
    run_graph(ONES, few, 1, run_dir=Path("learns"), inline=True)
    printed = capsys.readouterr().out
    assert re.findall(r"^note: after iteration \d+: .*\((.*)\)$", printed, re.MULTILINE) == ["cut-off"]
    assert "\n  try rollout.max_new_tokens=8\n" in printed
    assert json.loads(Path("learns/alarms.jsonl").read_text())["rule"] == "cut-off"
