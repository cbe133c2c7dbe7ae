"""State of ops: from iteration to iteration, in checkpoints, on any number of devices, read by others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cadenced import HERE, checkpoint, graph, ran, same

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, RunError
from rlgraph.nodes.select.difficulty import difficulty, within
from rlgraph.ops import Context
from rlgraph.printing.plan_text import plan_text
from rlgraph.runtime.replay import replay
from rlgraph.runtime.run import run_graph

OPS = HERE / "state_ops.py"
ONE = "set: {pools: {main: {devices: 1}}}"
APART = "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"
KEPT = f"insert: {{kept: {{op: '{OPS}:less_its_mean', on: rewards}}}}"
READ = f"insert: {{read: {{op: '{OPS}:plus_the_mean', on: kept, state: kept, in: {{rewards: kept}}}}}}"
TIS = "add: {rollout_weights: {op: correction.tis}}"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def column(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines]


def state(run_dir: str, iteration: int) -> dict[str, Any]:
    kept = json.loads(Path(run_dir, f"checkpoints/step-{iteration:06d}/state.json").read_text())
    return {node: json.loads(text) for node, text in kept["states"].items()}


def expected(rewards: list[float]) -> list[float]:
    """The running mean before each iteration."""
    means = [0.0]
    for mean in rewards[:-1]:
        means.append(0.5 * means[-1] + 0.5 * mean)
    return means


def grpo(*edits: str) -> str:
    return graph("grpo", "set: {update_policy.minibatches: 1}", *edits)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_state_goes_from_iteration_to_iteration(devices: int, run_on_devices: Callable[..., str]) -> None:
    path = grpo(KEPT, READ)
    run_on_devices(path, "--devices", str(devices), "--run-dir", "run")
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    means = expected(column(lines, "reward/mean" if "reward/mean" in lines[0] else "rewards/mean"))
    assert column(lines, "kept/before") == pytest.approx(means, abs=1e-6)
    assert column(lines, "read/read") == column(lines, "kept/before")  # as it was before the iteration
    assert len(set(means)) > 2
    assert state("run", 4)["kept"]["rows"] == [12] * 4 and [*state("run", 4)] == ["kept"]


def test_a_state_is_there_where_generation_runs_ahead() -> None:
    lines = ran(grpo(APART, TIS, KEPT, READ), "run")
    assert column(lines, "read/read") == column(lines, "kept/before")
    assert column(lines, "kept/before")[0] == 0.0 and len({*column(lines, "kept/before")}) == 4


def test_a_resumed_run_has_the_state_of_its_checkpoint() -> None:
    path = grpo(ONE, KEPT, READ)
    lines = ran(path, "whole")
    shutil.copytree("whole", "half")
    for later in ("step-000003", "step-000004"):
        shutil.rmtree(f"half/checkpoints/{later}")
    assert ran(path, "half", resume=True) == lines
    assert state("half", 4) == state("whole", 4)
    assert same(checkpoint("half", 4), checkpoint("whole", 4))


def test_a_replay_has_the_state_that_the_iteration_began_with() -> None:
    ran(grpo(ONE, KEPT, READ, "set: {schedule.record_every: 1}"), "run")
    results = {one.name: one for _, found in replay(Path("run"), 3, "kept").steps for one in found}
    assert all(one.same for one in results.values())
    assert {"kept/before", "read/read"} <= {*results}


def test_an_evaluation_reads_a_state_and_changes_none() -> None:
    evaluated = "add: {eval: {every: 1, nodes: {rollout: {n: 1}}, report: {score: read}}}"
    lines = ran(grpo(ONE, KEPT, READ), "plain")
    assert ran(grpo(ONE, KEPT, READ, evaluated), "evaluated")[-1]["kept/before"] == lines[-1]["kept/before"]
    assert state("evaluated", 4) == state("plain", 4)


@pytest.mark.parametrize("name", ["keeps_a_tensor", "keeps_nan"])
def test_what_no_checkpoint_can_hold_is_refused(name: str) -> None:
    path = grpo(ONE, f"insert: {{kept: {{op: '{OPS}:{name}', on: rewards}}}}")
    with pytest.raises(RunError, match=r"`kept`.*leaves a state that checkpoints can't hold"):
        run_graph(path, (), 1, inline=True, steps=1, run_dir=Path("run"))


def test_a_state_that_is_read_is_kept_though_no_update_needs_it() -> None:
    plan = compile_graph("curriculum", ["prompts.files=[a.jsonl]"], 2)
    assert {"solved", "difficulty"} <= {step.node for step in plan.steps}
    text = plan_text(plan)
    assert "that of difficulty before the iteration" in text and "may cut groups" not in text
    with pytest.raises(GraphError, match="did you mean `difficulty`"):
        compile_graph("curriculum", ["wanted.state=dificulty"], 2)


def test_difficulty_is_a_running_share() -> None:
    ctx = Context("difficulty", 0, 0)
    first = difficulty(ctx, ["a", "b"], torch.tensor([1.0, 0.0]))
    again = difficulty(ctx, ["a", "c"], torch.tensor([0.0, 0.5]), decay=0.75)
    assert first.tolist() == [1.0, 0.0] and again.tolist() == [0.75, 0.5]
    assert len(ctx.state) == 3
    reader = Context("wanted", 0, 1, state=ctx.state)
    asked = ["a", "b", "c", "new"]
    assert within(reader, asked, min=0.1, max=0.7).tolist() == [False, False, True, True]
    assert within(reader, asked, min=0.0, max=1.0).all()
    many = ["a", "b"] * 500
    drawn = [
        within(Context("w", 0, i, state=ctx.state), ["b"], min=0.1, explore=0.2).item() for i in range(900)
    ]
    assert 0.15 < sum(drawn) / 900 < 0.25 and within(reader, many, min=0.1, max=0.7, explore=1.0).all()
