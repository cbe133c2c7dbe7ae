"""Rows that last: given again in later iterations, in checkpoints, the same on any number of devices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cadenced import checkpoint, graph, ran, same

from rlgraph.nodes.support.record_file import about, read, steps_of
from rlgraph.runtime.replay import replay

ONE = "set: {pools: {main: {devices: 1}}}"
APART = "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"
RATIO = "set: {update_policy.in.old_logprobs: rollout_logprobs}"
SELDOM = (
    "set: {rollout.every: 2, rollout.from: 1, update_policy.minibatches: 1, schedule.record_every: 1}",
    "add: {kept: {op: replay, rows: rollout, fresh: true, capacity: 12, staleness: 1}}",
    "set: {update_policy.rows: kept}",
)
JOINED = (
    "set: {update_policy.minibatches: 1, schedule.iterations: 6, schedule.record_every: 1}",
    "add: {again: {op: replay, rows: rollout, capacity: 30, staleness: 3, batch: 5, half_life: 1, "
    "in: {priority: rewards}}}",
    "set: {update_policy.rows: [rollout, again]}",
    RATIO,
)


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def recorded(run: str, iteration: int) -> dict[str, Any]:
    """The columns of an iteration, each as a list of rows."""
    columns = {}
    for path in steps_of(Path(run))[iteration].glob("*.parquet"):
        for name, column in read(path, [*about(path).types]).items():
            rows, offsets = column.values, column.offsets
            values = rows if isinstance(rows, list) else rows.tolist()
            whole = range(len(offsets) - 1) if offsets is not None else ()
            columns[name] = [tuple(values[offsets[i] : offsets[i + 1]]) for i in whole] or values
    return columns


def lines_of(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def rows(run: str, iteration: int, whose: str) -> list[tuple[Any, ...]]:
    """The tokens and the advantages of some rows of an iteration."""
    columns = recorded(run, iteration)
    return [*zip(columns[f"tokens/{whose}"], columns[f"advantages/{whose}"], strict=True)]


def state(run: str, iteration: int) -> dict[str, Any]:
    return dict(json.loads(Path(run, f"checkpoints/step-{iteration:06d}/state.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_rollout_serves_two_iterations(devices: int, run_on_devices: Callable[..., str]) -> None:
    run_on_devices(graph("grpo", *SELDOM), "--devices", str(devices), "--run-dir", "run")
    lines = lines_of("run")
    assert ["reward/mean" in line for line in lines] == [True, False] * 2
    assert ["time/rollout" in line for line in lines] == [True, False] * 2
    assert [line["kept/age"] for line in lines] == [0, 1, 0, 1]
    assert [line["kept/held"] for line in lines] == [12, 0, 12, 0]
    assert len({line["update_policy/loss"] for line in lines}) == 4
    for first in (1, 3):
        came = rows("run", first, "rollout")
        assert len(came) == 12 and came == rows("run", first, "kept") == rows("run", first + 1, "kept")
        assert "tokens/rollout" not in recorded("run", first + 1)
    assert rows("run", 1, "kept") != rows("run", 3, "kept")
    assert [state("run", n)["positions"] for n in (1, 2, 3, 4)] == [{"prompts": n} for n in (4, 4, 8, 8)]
    assert state("run", 4)["versions"]["policy"] == 4
    samples = [json.loads(line) for line in Path("run/samples/step-000003.jsonl").read_text().splitlines()]
    assert len(samples) == 12 and {"tokens", "responses", "rewards", "advantages"} <= {*samples[0]}
    assert not Path("run/samples/step-000004.jsonl").exists()  # nothing was sampled


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_rows_that_are_given_again_join_those_that_come(
    devices: int, run_on_devices: Callable[..., str]
) -> None:
    run_on_devices(graph("grpo", *JOINED), "--devices", str(devices), "--run-dir", "run")
    came: dict[tuple[Any, ...], int] = {}
    for number, line in enumerate(lines_of("run"), 1):
        given, ages = rows("run", number, "again"), recorded("run", number)["age"]
        assert len(given) == len({*given}) == (5 if number > 1 else 0)
        assert [number - came[row] for row in given] == ages and all(1 <= age <= 3 for age in ages)
        assert line["again/held"] == min(12 * number, 30)
        assert line["again/age"] == pytest.approx(sum(ages) / 5) if ages else "again/age" not in line
        assert len(recorded("run", number)["tokens/rollout+again"]) == 12 + len(given)
        came |= dict.fromkeys(rows("run", number, "rollout"), number)


@pytest.mark.nightly
def test_draws_are_the_same_on_two_devices(run_on_devices: Callable[..., str]) -> None:
    for devices in (1, 2):
        run_on_devices(graph("grpo", *JOINED), "--devices", str(devices), "--run-dir", f"on{devices}")
    assert [rows("on1", n, "again") for n in range(1, 7)] == [rows("on2", n, "again") for n in range(1, 7)]
    for one, two in zip(lines_of("on1"), lines_of("on2"), strict=True):
        for name in ("update_policy/loss", "update_policy/grad_norm", "again/age", "reward/mean"):
            assert one.get(name) == pytest.approx(two.get(name), abs=1e-5)


@pytest.mark.parametrize("edits", [SELDOM, JOINED])
@pytest.mark.parametrize("last", [1, 3])
def test_a_resumed_run_holds_the_rows_of_its_checkpoint(edits: tuple[str, ...], last: int) -> None:
    path = graph("grpo", ONE, *edits)
    lines = ran(path, "whole")
    shutil.copytree("whole", "part")
    for later in range(last + 1, len(lines) + 1):
        shutil.rmtree(f"part/checkpoints/step-{later:06d}")
    assert ran(path, "part", resume=True) == lines
    assert same(checkpoint("part", len(lines)), checkpoint("whole", len(lines)))


def test_rows_last_where_generation_runs_ahead() -> None:
    lines = ran(graph("grpo", APART, RATIO, *SELDOM), "seldom")
    assert [line["kept/age"] for line in lines] == [0, 1, 0, 1]
    assert rows("seldom", 3, "rollout") == rows("seldom", 4, "kept")
    lines = ran(graph("grpo", APART, *JOINED), "joined")
    assert [line["again/held"] for line in lines] == [12, 24, 30, 30, 30, 30]


def test_a_replay_begins_with_the_rows_that_the_iteration_had() -> None:
    ran(graph("grpo", ONE, *JOINED), "joined")
    results = {one.name: one for _, found in replay(Path("joined"), 4, "again").steps for one in found}
    assert all(one.same for one in results.values()), results
    assert {"again/held", "again/age", "tokens/again"} <= {*results}
    ran(graph("grpo", ONE, *SELDOM), "seldom")
    results = {one.name: one for _, found in replay(Path("seldom"), 4, "kept").steps for one in found}
    assert all(one.same for one in results.values()), results
