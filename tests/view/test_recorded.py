"""What is read of a run's folder, whole or while the run still writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlgraph.errors import GraphError, RunError
from rlgraph.ir.plan import Plan
from rlgraph.request import PlanRequest
from rlgraph.view.recorded import FILE_BYTES, ITERATIONS, POINTS, metrics_so_far, read_timeline, recorded
from rlgraph.view.subject import subject
from rlgraph.view.trace import trace


@pytest.fixture
def plan() -> Plan:
    return subject(PlanRequest("grpo", devices=1)).plan


@pytest.fixture
def folder(plan: Plan, tmp_path: Path) -> Path:
    (tmp_path / "plan.json").write_text(plan.json())
    return tmp_path


def event(step: int, iteration: int, ts: int) -> str:
    args = {"step": step, "iteration": iteration, "phase": "train"}
    return json.dumps({"ph": "X", "ts": ts, "dur": 5, "pid": "main", "tid": 0, "args": args}) + ",\n"


def test_a_run_that_has_only_begun(folder: Path) -> None:
    found = recorded(folder)
    assert (found["metrics"], found["bars"], found["samples"]["files"]) == ({}, [], {})
    assert ["iterations", "0 of 500"] in [list(fact) for fact in found["facts"]]


def test_the_last_line_of_a_timeline_may_be_cut_short(folder: Path) -> None:
    whole = "[\n" + event(1, 0, 1000) + event(2, 0, 1010)
    (folder / "timeline.json").write_text(whole + event(3, 0, 1020)[:40])
    assert [(bar.step, bar.start) for bar in read_timeline(folder)] == [(1, 0.0), (2, 1e-05)]
    (folder / "timeline.json").write_text(whole.rstrip(",\n"))
    assert len(read_timeline(folder)) == 2


def test_of_a_long_run_a_part_is_shown(folder: Path) -> None:
    lines = [{"step": n, "reward/mean": n / 7, "time/step": 1.0} for n in range(1, 2 * POINTS)]
    lines[8]["eval/accuracy"] = 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timeline.json").write_text("[\n" + "".join(event(1, n, 10 * n) for n in range(50)))
    found = recorded(folder)
    steps = found["metrics"]["step"]
    assert len(steps) <= POINTS + 2 and steps[0] == 1 and steps[-1] == 2 * POINTS - 1
    assert 0.5 in found["metrics"]["eval/accuracy"]
    assert found["iterations"] == [0, 1, 2, 3, 46, 47, 48, 49]
    assert len(found["bars"]) == ITERATIONS


def test_numbers_that_json_does_not_have_are_null(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "norm": Infinity, "time/step": 1.0}\n')
    found = recorded(folder)["metrics"]
    assert (found["loss"], found["norm"]) == ([None], [None])


def test_measured_stands_beside_predicted(folder: Path, plan: Plan) -> None:
    name = plan.steps[3].node
    lines = [
        {"step": n, "time/step": 3.0, f"time/{name}": seconds}
        for n, seconds in ((1, 9.0), (2, 1.0), (3, 2.0))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = recorded(folder)["beside"]
    assert (row["step"], row["measured"], row["ratio"]) == (plan.steps[3].id, 1.5, None)


def test_large_samples_are_named_but_not_held(folder: Path) -> None:
    (folder / "samples").mkdir()
    for step in range(10):
        row = json.dumps({"responses": "x" * 900_000}) + "\n"
        (folder / "samples" / f"step-{step:06d}.jsonl").write_text(row)
    found = recorded(folder)["samples"]
    assert list(found["files"]) == ["step-000000", "step-000008", "step-000009"]
    assert len(found["omitted"]) == 7


def test_of_a_large_file_the_first_rows_are_held(folder: Path) -> None:
    (folder / "samples").mkdir()
    row = json.dumps({"responses": "x" * 1000}) + "\n"
    (folder / "samples" / "step-000001.jsonl").write_text(row * 2000)
    found = recorded(folder)["samples"]["files"]["step-000001"]
    assert found["of"] == 2000
    held = sum(len(json.dumps(row, separators=(",", ":"))) for row in found["rows"])
    assert FILE_BYTES - 2000 < held <= FILE_BYTES


def test_samples_have_few_digits_and_no_infinities(folder: Path) -> None:
    (folder / "samples").mkdir()
    row = '{"pieces": ["a"], "logprobs": [-0.123456789], "rewards": NaN, "nested": {"x": [Infinity]}}\n'
    (folder / "samples" / "step-000001.jsonl").write_text(row)
    (found,) = recorded(folder)["samples"]["files"]["step-000001"]["rows"]
    assert found == {"pieces": ["a"], "logprobs": [-0.123457], "rewards": None, "nested": {"x": [None]}}


def test_the_environment_is_read_where_there_is_one(folder: Path) -> None:
    assert recorded(folder)["environment"] is None
    (folder / "environment.json").write_text("")  # it is being written
    assert recorded(folder)["environment"] is None
    (folder / "environment.json").write_text('{"python": "3.11"}')
    assert recorded(folder)["environment"] == {"python": "3.11"}


def test_what_is_no_run_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="that is a folder"):
        subject(PlanRequest(str(tmp_path)))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(GraphError, match="not a plan of rlgraph"):
        subject(PlanRequest(str(tmp_path)))
    with pytest.raises(RunError, match="is a run"):
        subject(PlanRequest(str(tmp_path), ["rollout.n=2"]))


def test_a_real_run_has_both_groups_in_its_trace(run_dir: Path) -> None:
    measured = read_timeline(run_dir), metrics_so_far(run_dir)
    events = json.loads(trace(subject(PlanRequest(str(run_dir))).plan, *measured))["traceEvents"]
    groups = {event["cat"].partition(",")[0] for event in events if event["ph"] == "X"}
    assert groups == {"predicted", "measured"}
    assert {event["cat"] for event in events if event["ph"] == "s"} == {"predicted,flow", "measured,flow"}
    counted = {(event["name"], event["pid"] > 1000) for event in events if event["ph"] == "C"}
    assert counted >= {("requests in flight", False), ("requests in flight", True)}
    assert ("most memory so far", True) in counted
