"""Text from graphs, files and models is shown as text, however it is made; and large graphs are quick."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlgraph.ir.plan import Plan
from rlgraph.request import PlanRequest
from rlgraph.view.contents import contents
from rlgraph.view.page import page, sweep_page
from rlgraph.view.subject import Subject, subject

NASTY = '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1">\u2028\'`${1}&amp;<!--'
LEAVES = 1500


def hostile(plan: Plan) -> Plan:
    """With names and values that no graph could have, in place of those of its first step."""
    first, *rest = plan.steps
    step = replace(first, node=NASTY, because=NASTY, action=replace(first.action, op=NASTY))
    functions = {"train": dict(plan.functions["train"])}
    functions["train"][NASTY] = replace(functions["train"].pop(first.node), attributes={NASTY: [NASTY]})
    models = {name: replace(model, path=NASTY) for name, model in plan.models.items()}
    return replace(plan, about=NASTY, steps=(step, *rest), functions=functions, models=models, notes=(NASTY,))


def write_run(plan: Plan, folder: Path) -> Path:
    """A run's folder as a run would leave it, of one iteration, with hostile samples and metrics."""
    (folder / "samples").mkdir(parents=True)
    (folder / "plan.json").write_text(plan.json())
    metrics = {"step": 1, "reward/mean": 0.5, NASTY: 1.0, f"eval/{NASTY}": 0.25, "time/step": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    event = {"name": NASTY, "cat": "run", "ph": "X", "ts": 10, "dur": 20, "pid": "main", "tid": 0}
    event["args"] = {"step": 1, "iteration": 0, "phase": "train"}
    (folder / "timeline.json").write_text("[\n" + json.dumps(event) + ",\n" + '{"name": "cut sh')
    pieces = {
        "tokens": "a" + NASTY,
        "pieces": ["a", NASTY, "<b>c", "d", "e"],
        "loss_mask": [False, True, True, False, True],
        "rollout_logprobs": [0.0, -2.0, float("nan"), 0.0, -1.0],
        NASTY: [0, 1, 2, 3, 4],
    }
    rows = [{"responses": NASTY, NASTY: 0.5, "nested": {NASTY: NASTY}}, {**pieces, "rewards": float("inf")}]
    ran = {
        NASTY: NASTY,
        "packages": {NASTY: NASTY},
        "devices": [{NASTY: NASTY}, {}],
        "none": None,
        "list": [1],
    }
    (folder / "environment.json").write_text(json.dumps(ran))
    error = {"restart": 1, "of": 2, "time": 1e9, "after": 3, "reason": f"main[0] is gone\n  {NASTY}"}
    (folder / "restarts.jsonl").write_text(json.dumps(error) + "\n" + '{"restart": 2, "cut sh')
    alarm = {"step": 3, "rule": NASTY, "law": NASTY, "why": NASTY, "edits": [NASTY]}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    (folder / "samples" / "step-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_hostile_text_is_shown_as_text(browser: Any, tmp_path: Path) -> None:
    plan = hostile(subject(PlanRequest("grpo", devices=1)).plan)
    run = write_run(subject(PlanRequest("grpo", devices=1)).plan, tmp_path / "<b>run")
    made = contents(subject(PlanRequest(str(run))), subject(PlanRequest("ppo", devices=1)))
    shown = contents(Subject(plan))
    for part in ("about", "phases", "models", "notes"):
        made[part] = shown[part]
    made["diff"]["edits"] = [["set", NASTY]]
    made["diff"]["plan"] = [NASTY]
    path = tmp_path / "page.html"
    path.write_text(page(made), encoding="utf-8")
    browser.complaints()
    browser.open(path, "run")
    for panel in ("graph", "plan", "diff", "run"):
        browser.click(f"#tab-{panel}")
        browser.settle()
        said = browser.do("return document.getElementById(arguments[0]).textContent", f"panel-{panel}")
        assert NASTY.partition("\u2028")[0] in said, panel
    browser.do("page.open('graph'); page.select('step', page.contents.phases.train.steps[0])")
    browser.do("page.select('model', 'policy')")
    assert NASTY in browser.do("return document.getElementById('detail').textContent")
    assert browser.do("return window.pwned") is None
    assert browser.count("img") == browser.count("b > b") == 0
    assert browser.complaints() == []


def test_hostile_names_of_runs_and_metrics_are_shown_as_text(browser: Any, tmp_path: Path) -> None:
    metrics = {"step": [0, 1], NASTY: [0.5, None], "reward/mean": [None, 1.0]}
    lines = [{"name": NASTY, "runs": [{"name": NASTY, "metrics": metrics}] * 2}, {"name": "none", "runs": []}]
    shown = {
        "graph": NASTY,
        "folder": NASTY,
        "headline": [(NASTY, NASTY)],
        "heads": [NASTY],
        "metrics": [NASTY],
        "rows": [{"cells": [NASTY, "2", NASTY], "highest": [2]}],
        "legend": NASTY,
        "curves": lines,
        "runs": [(NASTY, NASTY)],
    }
    swept = tmp_path / "sweep.html"
    swept.write_text(sweep_page(shown), encoding="utf-8")
    run = write_run(subject(PlanRequest("grpo", devices=1)).plan, tmp_path / "<b>run")
    compared = contents(subject(PlanRequest(str(run))), subject(PlanRequest(str(run))))
    compared["diff"] |= {"old": NASTY, "new": NASTY, "outcome": {NASTY: NASTY}, "curves": lines}
    path = tmp_path / "compared.html"
    path.write_text(page(compared), encoding="utf-8")
    browser.complaints()
    for file, panel in ((swept, "sweep"), (path, "diff")):
        browser.open(file)
        browser.settle()
        said = browser.do("return document.getElementById(arguments[0]).textContent", f"panel-{panel}")
        assert NASTY.partition("\u2028")[0] in said
        assert browser.do("return window.pwned") is None and browser.count("img") == 0
    assert browser.complaints() == []


@pytest.fixture
def sampled(browser: Any, tmp_path: Path) -> Any:
    """The page of a run with a row of tokens, open."""
    run = write_run(subject(PlanRequest("grpo", devices=1)).plan, tmp_path / "run")
    path = tmp_path / "page.html"
    path.write_text(page(contents(subject(PlanRequest(str(run))))), encoding="utf-8")
    browser.complaints()
    browser.open(path, "run")
    yield browser
    assert browser.complaints() == []


def test_tokens_stand_in_turns(sampled: Any) -> None:
    turns = "return [...document.querySelectorAll('.turn')].map((t) => [t.className, t.textContent])"
    assert sampled.do(turns) == [
        ["turn prompt", "prompta"],
        ["turn policy", f"policy{NASTY}<b>c"],
        ["turn tool", "tool outputd"],
        ["turn policy", "policye"],
    ]
    # the whole text of a row is in its pieces, and of a row without any it is shown
    assert sampled.count(".turn") == 4
    assert NASTY in sampled.do("return document.querySelector('.sample').textContent")


def test_tokens_are_coloured_by_their_numbers(sampled: Any) -> None:
    read = "return [...document.querySelectorAll('.tokens span')].map((span) => span.getAttribute('style'))"
    assert "--more) 55%" in sampled.do(read)[4]  # the last column
    sampled.do("document.activeElement.blur()")
    sampled.type("c")
    assert ["--more" in style for style in sampled.do(read)] == [False, True, True, False, True]
    sampled.type("c")
    prompt, first, missing, tool, last = sampled.do(read)
    assert "--less) 55%" in first and "--less) 28%" in last
    assert prompt == missing == tool == ""
    sampled.shot("tokens")


def test_tokens_say_their_numbers_to_keys(sampled: Any) -> None:
    sampled.do("document.querySelector('.turns').focus()")
    sampled.type("\ue014\ue014")  # right, right
    said = sampled.text(".sample output")
    assert said.startswith("token 1 · loss_mask true · rollout_logprobs -2 · ")
    assert sampled.do("return document.querySelector('.marked').textContent") == NASTY
    sampled.type("\ue014")
    assert "rollout_logprobs null" in sampled.text(".sample output")  # it was no number


def test_rows_are_filtered_by_their_letters(sampled: Any) -> None:
    sampled.do("const page_ = page.panels.run.samples; page_.letters = 'nested'; page_.draw()")
    assert sampled.count(".sample") == 1
    sampled.do("const page_ = page.panels.run.samples; page_.letters = 'not there'; page_.draw()")
    assert sampled.count(".sample") == 0


def test_errors_are_shown_as_text(sampled: Any) -> None:
    said = sampled.do("return document.querySelector('#restarts').textContent")
    assert NASTY in said and "main[0] is gone" in said
    alarms = sampled.do("return document.querySelector('#alarms').textContent")
    assert "what the watchdog says (1)" in alarms and alarms.count(NASTY) == 4


def test_what_a_run_ran_on_is_shown_whatever_it_is(sampled: Any) -> None:
    said = sampled.do("return document.querySelector('#environment').textContent")
    assert said.count(NASTY) >= 5
    assert sampled.count("#environment table tbody tr") == 2


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of some 2,000 steps: rewards, and their sums by fours."""
    folder = tmp_path_factory.mktemp("large")
    level = [f"leaf_{number}" for number in range(LEAVES)]
    lines = [f"  - add: {{{name}: {{op: reward.overlong, limit: 1024, buffer: 9}}}}" for name in level]
    ports = ("rewards", "rewards_2", "rewards_3", "rewards_4")
    while len(level) > 1:
        groups = [level[start : start + 4] for start in range(0, len(level), 4)]
        for group in (found for found in groups if len(found) > 1):
            read = ", ".join(f"{port}: {name}" for port, name in zip(ports, group, strict=False))
            weights = "".join(f", weight_{n}: 1" for n in range(2, len(group) + 1))
            lines.append(
                f"  - add: {{sum_{group[0]}_{len(level)}: {{op: reward.sum, in: {{{read}}}{weights}}}}}"
            )
        level = [f"sum_{g[0]}_{len(level)}" if len(g) > 1 else g[0] for g in groups]
    lines.append(f"  - set: {{advantages.in.rewards: {level[0]}}}")
    (folder / "large.yaml").write_text("\n".join(["graph: large", "extends: grpo", "edits:", *lines]) + "\n")
    path = folder / "large.html"
    path.write_text(page(contents(subject(PlanRequest(str(folder / "large.yaml"), devices=1)))))
    return path


@pytest.mark.nightly
def test_two_thousand_steps_are_drawn_and_searched(browser: Any, large: Path) -> None:
    browser.complaints()
    browser.open(large)
    assert browser.count("#panel-graph .node") > 2000
    browser.do("page.find('leaf_700')")
    assert browser.text("#detail h2") == "leaf_700"
    took = browser.do("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"drawn after {took:.0f} ms")
    browser.shot("large")
    browser.do("page.find('advantages'); page.panels.graph.fold()")
    assert browser.count("#panel-graph .node") < 15  # all the rewards lead to it alone
    assert browser.text("#panel-graph .node.folded .op").endswith(" steps, folded")
    browser.do("page.panels.graph.fold()")
    assert browser.count("#panel-graph .node") > 2000
    browser.click("#tab-plan")
    browser.settle()
    assert browser.count("#panel-plan tr[data-row]") > 2000
    assert browser.complaints() == []
