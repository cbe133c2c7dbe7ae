"""Regions that are repeated until a filter has kept enough: targets, what waits, resume, ranks, overlap."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ran import metrics, same_weights

from rlgraph.errors import RunError
from rlgraph.runtime.columns.chunk import Chunk, load, save
from rlgraph.runtime.driver.row_buffer import BufferedRows, Selection, joined
from rlgraph.runtime.run import run_graph

GRAPH = str(Path(__file__).parent / "refilled.yaml")
HALF = ("mixed.refill={expected: 0.5}", "update_policy.in.old_logprobs=rollout_logprobs")
WAITING = (*HALF, "schedule.buffer={staleness: 1}")
POOLS = "pools={train: {devices: 1}, gen: {devices: 1}}"
IN_TURN = (*HALF, POOLS, "schedule.buffer={staleness: 1, by: surplus}")
# at a checkpoint nothing is in flight, so both runs have one after the second iteration
AHEAD = (*HALF, POOLS, "schedule={iterations: 4, buffer: {staleness: 1, by: batch}, save_every: 2}")
pytestmark = pytest.mark.usefixtures("in_demo")


def run(run_dir: str, *settings: str, devices: int = 1, **given: Any) -> None:
    run_graph(GRAPH, settings, devices, run_dir=Path(run_dir), inline=devices == 1, **given)


def test_every_iteration_has_exactly_the_rows_of_one_batch() -> None:
    run("a")
    lines = metrics("a")
    assert [line["rows/used"] for line in lines] == [28] * 4
    assert [line["rows/groups"] for line in lines] == [7] * 4
    # two in nine groups had one reward: one round was not enough, and its groups are not counted twice
    assert all(line["mixed/rounds"] > 1 for line in lines)
    assert all(line["mixed/stayed"] == line["mixed/kept"] < 1 for line in lines)
    assert len({line["rows/numbers"] for line in lines}) == 4
    state = json.loads(Path("a/checkpoints/step-000004/state.json").read_text())
    seen = sum((28 + line["mixed/surplus"]) / line["mixed/stayed"] / 4 for line in lines)
    assert state["positions"]["prompts"] == pytest.approx(seen) and not state["waiting"]
    timed = json.loads(Path("a/metrics.jsonl").read_text().partition("\n")[0])
    events = json.loads(Path("a/timeline.json").read_text().rstrip().rstrip(",") + "]")
    first = [e["dur"] / 1e6 for e in events if e["name"] == "rollout" and e["args"]["iteration"] == 1]
    assert len(first) == lines[0]["mixed/rounds"]
    assert timed["time/rollout"] == pytest.approx(sum(first), abs=1e-5)


def test_another_target_is_met_as_exactly() -> None:
    run("a", "mixed.refill={rows: 40, expected: 0.7, over_sample: 1.3}", "counted.rows=mixed", steps=2)
    assert [line["rows/used"] for line in metrics("a")] == [40, 40]


def test_too_few_rows_end_the_run_with_what_to_change() -> None:
    with pytest.raises(RunError) as caught:
        run("a", "mixed={op: filter.mixed, min_std: 9.0, refill: {rounds: 3}}")
    said = str(caught.value)
    assert "`mixed` kept 0 of 84 rows (0.0%) in 3 rounds; 28 more are wanted" in said
    assert "mixed.refill={rounds: 6, expected: 0.01}" in said
    assert "step 6 of iteration 1 failed on main[0]: collect the rows that mixed keeps" in said


def test_what_is_not_needed_waits_and_comes_first() -> None:
    run("a", *WAITING)
    lines = metrics("a")
    assert [line["rows/used"] for line in lines] == [28] * 4
    assert [line["rows/groups"] for line in lines] == [7] * 4
    for before, line in itertools.pairwise(lines):
        assert line["mixed/waited"] * 28 == pytest.approx(before["mixed/surplus"])
    state = json.loads(Path("a/checkpoints/step-000004/state.json").read_text())
    assert len(state["waiting"]["mixed"]["rows"]["made"]) == lines[-1]["mixed/surplus"]
    assert {*state["waiting"]["mixed"]["rows"]["made"]} == {3}


@pytest.mark.parametrize("settings", [WAITING, IN_TURN, AHEAD], ids=["one pool", "in turn", "overlap"])
def test_two_iterations_and_two_after_a_resume_are_four_bit_for_bit(settings: tuple[str, ...]) -> None:
    run("four", *settings)
    run("two", *settings, steps=2)
    state = json.loads(Path("two/checkpoints/step-000002/state.json").read_text())
    waiting = state["waiting"].get("mixed", {}).get("rows", {}).get("made", [])
    assert bool(waiting) == (settings is not AHEAD)
    run("two", *settings, resume=True)
    assert metrics("two") == metrics("four")
    assert [line["rows/used"] for line in metrics("four")] == [28] * 4
    assert same_weights("two", "four")


def policy(name: str) -> tuple[str, ...]:
    """On the command line a path is relative to the working directory."""
    file = Path(__file__).parent / "refill_policy.py"
    Path("refill_policy.py").write_text(file.read_text())
    return *HALF, f"schedule.buffer={{staleness: 2, order: 'refill_policy.py:{name}'}}"


@pytest.mark.slow
def test_a_policy_says_what_of_the_rest_comes_now_and_the_others_wait_on() -> None:
    run("a", *policy("one_young"))
    lines = metrics("a")
    assert [line["rows/used"] for line in lines] == [28] * 4
    assert lines[0]["mixed/surplus"] > 4
    assert all(line["mixed/waited"] == pytest.approx(4 / 28) for line in lines[1:])
    state = json.loads(Path("a/checkpoints/step-000004/state.json").read_text())["waiting"]["mixed"]["rows"]
    assert {*state["made"]} == {2, 3}  # those of the second iteration are too old by now
    run("b", *policy("one_young"), steps=2)
    run("b", *policy("one_young"), resume=True)
    assert metrics("a") == metrics("b") and same_weights("a", "b")


def test_the_policy_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text()
    (code,) = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    settings = policy("shortest")
    Path("refill_policy.py").write_text(code)
    run("a", *settings, steps=3)
    first, *later = metrics("a")
    groups = [min(3, line["mixed/surplus"] // 4) for line in (first, *later[:1])]
    assert [line["mixed/waited"] * 7 for line in later] == pytest.approx(groups)


def test_a_policy_that_takes_what_is_not_there_ends_the_run() -> None:
    with pytest.raises(
        RunError, match=r"policy refill_policy.py:twice returned \[0, 0\]; [0-9]+ groups wait"
    ):
        run("a", *policy("twice"))


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_one_and_two_ranks_collect_the_same_rows() -> None:
    run("one", *WAITING, steps=3)
    run("two", *WAITING, steps=3, devices=2)
    for left, right in zip(metrics("one"), metrics("two"), strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert math.isclose(left[name], right[name], rel_tol=1e-4, abs_tol=1e-4), (name, left, right)


def test_buffered_rows_keep_theirs_through_joins_selections_and_a_file(tmp_path: Path) -> None:
    def buffered(*sizes: int, first: int) -> BufferedRows:
        count = sum(sizes)
        numbers = np.arange(first, first + count)
        parts = tuple(np.split(numbers, np.cumsum(sizes)[:-1]))
        held = Selection(parts, sizes, np.arange(count)[::-1])
        return BufferedRows(numbers, numbers, numbers, {"x": held})

    def values(buffered: BufferedRows) -> list[int]:
        ((picks,), (count,)), parts = buffered.gathering(["x"])
        assert len(parts) == count
        return list(np.concatenate(parts)[picks])

    both = joined([buffered(2, 0, 3, first=0), buffered(4, first=10)])
    assert values(both) == [4, 3, 2, 1, 0, 13, 12, 11, 10]
    some = both.take(np.array([7, 0, 5]))
    assert values(some) == [11, 4, 13] and some.lengths.tolist() == [12, 0, 10]
    assert len(some.columns["x"].refs) == 2  # the parts that are not needed are let go
    assert values(some.take(np.array([1]))) == [4]
    assert values(both.take(np.array([], np.int64))) == []

    parts = [
        Chunk(["é", ""]),
        Chunk(np.array([1.5, -0.0], np.float32)),
        Chunk(np.arange(3), np.array([0, 0, 3])),
    ]
    save(str(tmp_path / "parts.npz"), parts)
    text, numbers, ragged = load(str(tmp_path / "parts.npz"))
    assert text.values == ["é", ""] and numbers.values.tobytes() == parts[1].values.tobytes()
    assert ragged.values.tolist() == [0, 1, 2] and ragged.offsets.tolist() == [0, 0, 3]
