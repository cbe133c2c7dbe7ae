"""Graphs, plans and runs from before ``schedule.buffer``: the former are refused, the latter read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, RunError
from rlgraph.ir.plan import Plan
from rlgraph.reports import plan_file
from rlgraph.reports.former_plans import present_plan
from rlgraph.runtime.rundir.changes import changes

FORMER = Path(__file__).parent / "former"  # plans that rlgraph wrote at commit 6c0ec98
POOLS = "pools={train: {devices: 1}, gen: {devices: 1}}"
RATIO = "update_policy.in.old_logprobs=rollout_logprobs"
TODAY = {
    "batch": ("grpo", [POOLS, RATIO, "schedule.buffer={staleness: 1, by: batch}"]),
    "group": ("grpo", [POOLS, RATIO, "schedule.buffer={staleness: 2, chunk: 32}"]),
    "surplus": ("dapo", [RATIO, "schedule.buffer={staleness: 2}"]),
    "replay": ("rest", []),
}


def plan_of(name: str) -> Plan:
    graph, settings = TODAY[name]
    return compile_graph(graph, settings, 2)


def as_data(plan: Plan) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(plan.json())
    for key in ("checksum", "origin", "digest", "about"):  # about: the line that describes a shipped graph
        del data[key]
    return data


@pytest.mark.parametrize("name", TODAY)
def test_a_plan_that_was_saved_with_former_keys_is_that_of_the_present_ones(name: str) -> None:
    saved, plan = plan_file.load(FORMER / f"{name}.json"), plan_of(name)
    assert as_data(saved) == as_data(plan)
    assert saved.origin and plan.origin
    assert saved.digest == plan.digest
    again = compile_graph(saved.origin.graph, saved.origin.overrides, 2)
    assert as_data(again) == as_data(plan)


@pytest.mark.parametrize("name", TODAY)
def test_a_run_that_was_begun_with_former_keys_goes_on_with_present_ones(name: str) -> None:
    saved = json.loads((FORMER / f"{name}.json").read_text())
    changed = changes(Path("run"), saved, plan_of(name))
    assert [setting.name for setting in changed if setting.name != "about"] == []


def test_other_values_of_the_environment_are_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLES", "4")
    saved = json.loads(compile_graph("grpo", ["rollout.n=${env:SAMPLES}"], 2).json())
    monkeypatch.setenv("SAMPLES", "8")
    with pytest.raises(RunError, match=r"other values of the environment"):
        changes(Path("run"), saved, compile_graph("grpo", ["rollout.n=${env:SAMPLES}"], 2))


def test_what_a_buffer_is_filled_by_is_compared_whether_a_graph_says_it_or_not() -> None:
    settings = TODAY["surplus"][1]
    saved = json.loads(compile_graph("dapo", settings, 2).json())
    explicit = compile_graph("dapo", [*settings, "schedule.buffer.by=surplus"], 2)
    assert not changes(Path("run"), saved, explicit)
    with pytest.raises(RunError, match=r"schedule\.buffer\.by: surplus -> group"):
        changes(Path("run"), saved, compile_graph("dapo", [*settings, POOLS], 2))


@pytest.mark.parametrize(
    ("former", "present"),
    [
        (["rollout.n=2", "schedule.stream.staleness=2"], ["rollout.n=2"]),
        (
            ["schedule={iterations: 5, staleness: 2}"],
            ["schedule={iterations: 5, buffer: {staleness: 2, by: batch}}"],
        ),
        (["informative.refill={keep: 2, rows: 8}"], ["informative.refill={rows: 8}"]),
        (["nodes.informative.refill.keep=2"], []),
    ],
)
def test_overrides_of_a_saved_plan_set_the_buffer_that_its_graph_has(
    former: list[str], present: list[str]
) -> None:
    saved = json.loads((FORMER / "group.json").read_text())
    saved["origin"]["overrides"] = former
    assert present_plan(saved)["origin"]["overrides"] == [
        *present,
        "schedule.buffer={staleness: 2, chunk: 32}",
    ]


def test_a_plan_of_today_is_read_as_it_is() -> None:
    data = json.loads(plan_of("group").json())
    assert present_plan(data) == data


@pytest.mark.parametrize(
    ("graph", "former", "present"),
    [
        ("decoupled_ppo", ["schedule.staleness=2"], "schedule.buffer: {staleness: 2, by: batch}"),
        ("decoupled_ppo", ["schedule.staleness=0"], "schedule.buffer: null"),
        ("grpo", [POOLS, "schedule.stream={chunk: 32}"], "schedule.buffer: {chunk: 32}"),
        ("grpo", ["schedule.stream=null"], "schedule.buffer: null"),
        ("dapo", ["informative.refill={keep: 1}"], "schedule.buffer: {staleness: 1}"),
        (
            "dapo",
            [POOLS, "informative.refill={keep: 1}"],
            "schedule.buffer: {staleness: 1, by: surplus}",
        ),
        ("rest", ["kept.max_age=2"], "kept.staleness: 2"),
    ],
)
def test_a_former_key_is_answered_with_the_present_one(graph: str, former: list[str], present: str) -> None:
    with pytest.raises(GraphError) as caught:
        compile_graph(graph, former, 2)
    (problem,) = caught.value.problems
    assert problem.kind == "former-key"
    assert problem.mark and problem.mark.source.text == former[-1]
    assert problem.remedy.endswith(f"set: {{{present}}}")


def test_an_edit_of_a_former_section_names_the_present_one() -> None:
    with pytest.raises(GraphError, match=r"it is called `schedule\.buffer\.chunk` now"):
        compile_graph("decoupled_ppo", ["schedule.stream.chunk=8"], 2)
