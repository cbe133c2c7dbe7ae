"""The timeline, held against the rules of the Trace Event Format."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.workload import workload
from rlgraph.ir.plan import Plan, Target
from rlgraph.view.recorded import Measured
from rlgraph.view.timeline import arrows, lanes
from rlgraph.view.trace import measured_requests, trace

Event = dict[str, Any]
ROLLOUT = {"grpo": 8, "ahead": 4}  # samples of a prompt
META = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}
AHEAD = """
graph: ahead
extends: ppo
edits:
  - add: {pools.train: {devices: 6}, pools.gen: {devices: 2}}
  - remove: [pools.main]
  - set: {schedule.buffer: {staleness: 1, by: batch}, update_policy.in.old_logprobs: rollout_logprobs}
"""


@pytest.fixture(scope="module", params=["grpo", "grpo on a cluster", "ahead"])
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of one pool and of two, with and without sizes."""
    if request.param == "grpo":
        return compile_graph("grpo", devices=2)
    if request.param == "grpo on a cluster":
        return compile_graph("grpo", target=Target("h100-8"))
    path = tmp_path_factory.mktemp("graphs") / "ahead.yaml"
    path.write_text(AHEAD)
    return compile_graph(str(path), target=Target("h100-8"))


def measured(plan: Plan) -> list[Measured]:
    """Two iterations of which each step takes 10 ms, one after the other on all its devices."""
    found, at = [], 100.0
    for iteration in range(2):
        for step in plan.steps:
            places = [(step.pool, device) for device in step.devices]
            if step.source:
                places += [(step.source, device) for device in range(plan.pools[step.source])]
            for pool, device in places:
                # ends are rounded up: by a microsecond they reach into the next
                found.append(Measured(step.id, "train", iteration, pool, device, at, at + 0.010001))
            at += 0.01
    return found


def read(plan: Plan) -> list[Event]:
    lines = [{"step": n, **{f"perf/memory/{pool}-0": 1e9 for pool in plan.pools}} for n in range(2)]
    made: list[Event] = json.loads(trace(plan, measured(plan), lines))["traceEvents"]
    return made


def counters(plan: Plan, name: str) -> list[Event]:
    return [event for event in read(plan) if event["ph"] == "C" and event["name"] == name]


def test_every_event_has_what_its_phase_asks_for(plan: Plan) -> None:
    for event in read(plan):
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0 and event["name"]
        assert event["ph"] in "XMCsfbe"
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in META
        if event["ph"] in "sfbe":
            assert event["cat"] and "id" in event
        if event["ph"] == "f":
            assert event["bp"] == "e"


def test_slices_of_a_thread_do_not_overlap(plan: Plan) -> None:
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in read(plan):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    assert threads
    for slices in threads.values():
        slices.sort(key=lambda event: (event["ts"], event["ts"] + event["dur"]))
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002  # rounded to nanoseconds


def test_flows_balance_and_stand_in_slices(plan: Plan) -> None:
    events = read(plan)
    slices = [event for event in events if event["ph"] == "X"]
    flows: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["cat"], event["id"]].append(event)
    assert {cat for cat, _ in flows} == {"predicted,flow", "measured,flow"}
    for start, end in flows.values():
        assert (start["ph"], end["ph"]) == ("s", "f")
        assert start["name"] == end["name"] and start["ts"] <= end["ts"]
        for event in (start, end):
            around = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
                and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            ]
            assert around, event


def test_iterations_are_spans_that_balance(plan: Plan) -> None:
    spans: dict[Any, list[Event]] = defaultdict(list)
    for event in read(plan):
        if event["ph"] in "be":
            spans[event["cat"], event["id"]].append(event)
    assert all([event["ph"] for event in found] == ["b", "e"] for found in spans.values())
    assert all(start["ts"] <= end["ts"] for start, end in spans.values())


def test_predicted_and_measured_are_two_groups_of_processes(plan: Plan) -> None:
    names = {e["pid"]: e["args"]["name"] for e in read(plan) if e["name"] == "process_name"}
    groups = Counter(name.partition(":")[0] for name in names.values())
    assert groups == {"predicted": len(plan.pools), "measured": len(plan.pools)}
    assert {event["pid"] for event in read(plan)} == names.keys()
    devices = Counter(e["pid"] for e in read(plan) if e["name"] == "thread_name")
    tasks = Counter({step.pool: len(step.devices) for step in plan.steps if step.on_host})  # predicted ones
    predicted = [count + tasks[pool] for pool, count in plan.pools.items()]
    assert sorted(devices.values()) == sorted([*plan.pools.values(), *predicted])


def test_memory_is_counted_where_the_cluster_is_known(plan: Plan) -> None:
    found = counters(plan, "memory of a device")
    assert bool(found) == (plan.predicted is not None)
    if plan.peak:
        most = max(sum(event["args"].values()) for event in found)
        assert most == max(peak.bytes for peak in plan.peak.values())
    measured_most = counters(plan, "most memory so far")
    assert len(measured_most) == 2 * len(plan.pools)
    assert all(event["pid"] > 1000 and event["args"] == {"device 0": 10**9} for event in measured_most)


def test_requests_in_flight_fall_to_none_in_each_rollout(plan: Plan) -> None:
    rollouts = Counter(
        e["pid"] for e in read(plan) if e["ph"] == "X" and (e["name"], e["tid"]) == ("rollout", 0)
    )
    found: dict[int, list[int]] = defaultdict(list)
    for event in sorted(counters(plan, "requests in flight"), key=lambda event: event["ts"]):
        found[event["pid"]].append(event["args"]["requests"])
    assert {pid: left.count(0) for pid, left in found.items()} == rollouts
    for left in found.values():
        ends = [index for index, count in enumerate(left) if count == 0]
        for begin, end in pairwise([-1, *ends]):
            falling = left[begin + 1 : end + 1]
            assert falling == sorted(falling, reverse=True) and falling[0] == 128 * ROLLOUT[plan.graph]
    predicted = min(found)
    assert len({*found[predicted]}) > 5  # short responses are there first


def test_each_round_of_a_region_has_its_requests() -> None:
    plan = compile_graph("dapo", ["informative.refill=true"], devices=2)
    rollout = next(step.id for step in plan.steps if step.node == "rollout")
    bars = [
        Measured(rollout, "train", 0, "main", device, start, start + 4 + device)
        for start in (0.0, 10.0)
        for device in range(2)
    ]
    rows = workload(plan).rows[plan.columns["train"]["tokens"].domain]
    seen = [(at, values["requests"]) for _, at, _, values in measured_requests(plan, bars)]
    half, quarter = round(rows / 2), round(rows / 4)
    assert seen == [(0, half), (4, quarter), (5, 0), (10, half), (14, quarter), (15, 0)]


def test_weights_go_from_an_update_to_the_next_sync() -> None:
    plan = compile_graph("grpo", devices=1)
    numbers = {step.node: step.id for step in plan.steps}
    across = [arrow for arrow in arrows(plan, 3) if arrow.source[1] != arrow.target[1]]
    update, sync = numbers["update_policy"], numbers["sync:policy"]
    assert [(a.source, a.target, a.name) for a in across] == [
        ((update, 0), (sync, 1), "policy@v"),
        ((update, 1), (sync, 2), "policy@v"),
    ]


def test_devices_that_do_the_same_share_a_lane(tmp_path: Path) -> None:
    path = tmp_path / "ahead.yaml"
    path.write_text(AHEAD)
    found = lanes(compile_graph(str(path), devices=8))
    assert [(lane.pool, lane.first, lane.last, lane.beside) for lane in found] == [
        ("train", 0, 0, False),
        ("train", 1, 5, False),
        ("gen", 0, 0, False),
        ("gen", 1, 1, False),
        ("gen", 0, 1, True),
    ]
