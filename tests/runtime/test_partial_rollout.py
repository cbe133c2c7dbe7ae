"""Rollouts a chunk at a time: the same samples, the first groups to end are used, the others go on later."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from ran import metrics
from safetensors.torch import load_file

from rlgraph.errors import RunError
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
PARTIAL, WHOLE = str(HERE / "partial.yaml"), str(HERE / "refilled.yaml")
CHUNKED = "rollout={op: rollout.partial, model: policy, n: 4, max_new_tokens: 12, chunk: 4}"
pytestmark = pytest.mark.usefixtures("in_demo")


def run(graph: str, run_dir: str, *settings: str, devices: int = 1, **given: Any) -> list[dict[str, Any]]:
    """The metrics of a run, but times."""
    run_graph(graph, settings, devices, run_dir=Path(run_dir), inline=devices == 1, **given)
    return metrics(run_dir)


def assert_close(a: list[dict[str, Any]], b: list[dict[str, Any]], passed_over: tuple[str, ...] = ()) -> None:
    for left, right in zip(a, b, strict=True):
        for name in {*left, *right} - {*passed_over}:
            assert math.isclose(left[name], right[name], rel_tol=1e-4, abs_tol=1e-4), (name, left, right)


@pytest.mark.slow
def test_samples_in_chunks_are_those_that_are_drawn_at_once() -> None:
    whole = run(WHOLE, "whole", steps=3)
    chunks = run(WHOLE, "chunks", CHUNKED, steps=3)
    assert all(line["mixed/rounds"] >= 3 for line in chunks)
    assert_close(whole, chunks, ("mixed/rounds", "mixed/unfinished", "mixed/aborted"))


def test_the_first_groups_to_end_are_used_and_the_others_go_on_with_newer_weights() -> None:
    lines = run(PARTIAL, "a")
    assert [line["rows/used"] for line in lines] == [14] * 4
    assert [line["rows/groups"] for line in lines] == [7] * 4
    assert lines[0]["versions/mixed"] == 0
    assert all(line["mixed/unfinished"] > 0 for line in lines)
    assert all(0 < line["versions/mixed"] <= line["mixed/waited"] for line in lines[1:])
    # what goes on was begun in the iteration before, at most
    assert all(0 <= line["versions/age"] <= 1 for line in lines)


def test_what_is_not_needed_is_given_up_where_nothing_waits() -> None:
    lines = run(PARTIAL, "a", "schedule.buffer=null", steps=3)
    assert [line["rows/used"] for line in lines] == [14] * 3
    assert sum(line["mixed/aborted"] for line in lines) > 0
    assert all(
        line["mixed/unfinished"] == line["versions/mixed"] == line["versions/age"] == 0 for line in lines
    )
    tokens = [line["tokens/generated"] for line in lines]
    full = run(PARTIAL, "b", "schedule.buffer=null", "rollout.chunk=24", steps=1)
    assert tokens[0] < full[0]["tokens/generated"]


@pytest.mark.slow
def test_groups_that_are_not_finished_come_back_from_a_checkpoint_bit_for_bit() -> None:
    whole = run(PARTIAL, "four")
    for steps in (1, 2):  # one of them leaves some
        run(PARTIAL, f"cut{steps}", steps=steps)
        assert run(PARTIAL, f"cut{steps}", resume=True) == whole
        weights = [load_file(f"{name}/models/policy/model.safetensors") for name in ("four", f"cut{steps}")]
        assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    left = json.loads(Path("cut1/checkpoints/step-000001/state.json").read_text())["waiting"]["mixed"]
    assert len(left["samples"]["made"]) == 2 * len(left["prompts"]["made"]) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_one_and_two_ranks_finish_the_same_groups() -> None:
    assert_close(run(PARTIAL, "one", steps=3), run(PARTIAL, "two", steps=3, devices=2))


@pytest.mark.slow
def test_ahead_of_training_a_region_is_the_same_on_one_pool_and_over_two() -> None:
    pools = "pools={train: {devices: 1}, gen: {devices: 1}}"
    settings = (pools, "schedule={iterations: 4, buffer: {staleness: 1, by: batch}, save_every: 2}")
    one = run(PARTIAL, "one", *settings)
    assert [line["rows/used"] for line in one] == [14] * 4
    assert max(line["versions/age"] for line in one) == 1  # what is left over is given up
    assert run(PARTIAL, "two", *settings, "rewards.pool=train", "mixed.pool=train") == one


def test_rounds_that_end_before_any_group_does_are_said_so() -> None:
    with pytest.raises(RunError, match=r"14 groups are not finished \(raise `chunk` or `enough`"):
        run(PARTIAL, "a", "rollout.chunk=1", "mixed.refill={rounds: 1, expected: 0.5}", "rollout.n=4")


def test_outside_a_region_it_runs_to_the_end() -> None:
    (line,) = run(PARTIAL, "a", "mixed.refill=false", "schedule.buffer=null", steps=1)
    assert line["rows/used"] == 14 and line["versions/mixed"] == 0
