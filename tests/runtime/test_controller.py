"""Numbers that follow a KL: their values from iteration to iteration, however a run is cut or laid out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cadenced import checkpoint, graph, ran, same

from rlgraph.errors import RunError
from rlgraph.runtime.replay import replay
from rlgraph.runtime.run import run_graph

ONE = "set: {pools: {main: {devices: 1}}}"
APART = "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"
SIX = "set: {schedule: {iterations: 6, save_every: 3, keep: 9}}"
SAMPLES = 12  # of an iteration


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def adaptive(start: float, target: float, horizon: int) -> str:
    return f"{{adaptive: {start}, target: {target}, horizon: {horizon}}}"


def grpo(target: float, *edits: str) -> str:
    """GRPO with an adaptive weight of the KL: 0.1 at first, 12 samples a tenth of the horizon."""
    kl = f"set: {{update_policy.kl_coef: {adaptive(0.1, target, 10 * SAMPLES)}}}"
    return graph("grpo", ONE, "set: {update_policy.minibatches: 1}", kl, *edits)


def expected(start: float, target: float, share: float, measured: list[float]) -> list[float]:
    """beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), from one iteration to the next."""
    values = [start]
    for kl in measured[:-1]:
        error = kl / target - 1
        error = -0.2 if error < -0.2 else 0.2 if error > 0.2 else error
        values.append(values[-1] * (1 + error * share))
    return values


def column(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def cut(run_dir: str, copy: str, iteration: int) -> None:
    """Leave of a run what it had after an iteration."""
    shutil.copytree(run_dir, copy)
    for folder in Path(copy, "checkpoints").iterdir():
        if int(folder.name.partition("-")[2]) > iteration:
            shutil.rmtree(folder)


def test_it_rises_above_the_target_and_falls_below() -> None:
    lines = ran(grpo(1e-3, SIX), "run")
    values, measured = column(lines, "update_policy/kl_coef"), column(lines, "update_policy/kl_ref")
    assert values == expected(0.1, 1e-3, 0.1, measured)
    assert measured[0] < 1e-3 < measured[-1]  # the policy begins as the reference
    assert values[1] == pytest.approx(0.098) and values[-1] > values[-2]


def test_three_iterations_and_three_resumed_are_six() -> None:
    path = grpo(1e-3, SIX)
    lines = ran(path, "whole")
    cut("whole", "half", 3)
    assert ran(path, "half", resume=True) == lines
    assert same(checkpoint("half", 6), checkpoint("whole", 6))


def test_it_is_the_weight_that_is_trained_with() -> None:
    ran(grpo(1e-3), "adapts", steps=2)
    (first, second) = column(ran(grpo(1e-3), "again", steps=2), "update_policy/kl_coef")
    course = f"set: {{update_policy.kl_coef: {{steps: {{1: {first}, 2: {second!r}}}}}}}"
    ran(graph("grpo", ONE, "set: {update_policy.minibatches: 1}", course), "steps", steps=2)
    assert second != first
    assert same(checkpoint("steps", 2), checkpoint("adapts", 2))


def test_an_iteration_that_leaves_the_node_out_changes_nothing() -> None:
    kl = f"set: {{update_policy.kl_coef: {adaptive(0.1, 1e-3, 10 * SAMPLES)}, update_policy.every: 2}}"
    lines = ran(graph("ppo", ONE, *PPO, kl), "run")  # the critic trains in all of them
    assert [line["step"] for line in lines if "update_policy/kl_coef" in line] == [2, 4, 6]
    values, measured = column(lines, "update_policy/kl_coef"), column(lines, "update_policy/kl_ref")
    assert values == expected(0.1, 1e-3, 0.1, measured)


PPO = (
    "set: {models.critic.path: demo_files/model, update_policy.minibatches: 1, update_critic.minibatches: 1}",
    f"set: {{shaped.beta: {adaptive(0.05, 0.01, 60)}}}",
    SIX,
)


def test_the_penalty_in_the_reward_while_generation_is_ahead() -> None:
    path = graph("ppo", APART, *PPO, "replace: {update_policy.loss: {kind: decoupled_ppo}}")
    lines = ran(path, "whole")
    values = column(lines, "shaped/beta")
    assert values == expected(0.05, 0.01, SAMPLES / 60, column(lines, "kl/ref"))
    assert len({*values}) > 3
    cut("whole", "half", 3)
    assert ran(path, "half", resume=True) == lines


def test_in_a_region_that_refills_all_rounds_have_one_number() -> None:
    refilled = "add: {mixed: {op: filter.mixed, refill: {rows: 12}}}"
    seen = "insert: {seen: {op: 'seen.py:seen', on: rewards}}"
    Path("seen.py").write_text(SEEN)
    shaped = f"set: {{shaped.beta: {adaptive(0.05, 0.01, 600)}, advantages.rows: mixed}}"
    lines = ran(graph("reinforce_pp", ONE, refilled, shaped, seen, SIX), "run")
    assert max(column(lines, "mixed/rounds")) > 1
    values, measured, rows = (column(lines, name) for name in ("shaped/beta", "kl/ref", "seen/rows"))
    for k in range(5):
        assert values[k : k + 2] == expected(values[k], 0.01, rows[k] / 600, measured[k : k + 2])


def test_a_metric_that_is_never_recorded() -> None:
    Path("dear.py").write_text(DEAR)
    dear = f"insert: {{dear: {{op: 'dear.py:dear', on: rewards, price: {adaptive(0.1, 1.0, 60)}}}}}"
    law = "`dear` recorded no `costs`, which its `price` follows\n  record it, .* names? one .*: cost, price"
    with pytest.raises(RunError, match=law):
        ran(graph("grpo", ONE, dear), "run", steps=2)


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_ranks_share_one_number() -> None:
    path = graph("ppo", "set: {pools: {main: {devices: 2}}}", *PPO)
    run_graph(path, (), 2, steps=3, run_dir=Path("run"))
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    values = expected(0.05, 0.01, SAMPLES / 60, column(lines, "kl/ref"))
    assert column(lines, "shaped/beta") == pytest.approx(values, rel=1e-12)


def test_an_iteration_that_runs_again_has_the_number_that_it_had() -> None:
    watched = "set: {schedule: {iterations: 3, save_every: 1, keep: 9, record_every: 1}}"
    ran(grpo(1e-3, watched), "run")
    found = replay(Path("run"), 3, "update_policy")
    results = {one.name: one for _, results in found.steps for one in results}
    assert all(one.same for one in results.values())
    assert results["update_policy/kl_coef"].now != "0.1"


SEEN = '''
from rlgraph.ops import Context, float32, op, samples


@op()
def seen(ctx: Context, rewards: float32[samples]) -> float32[samples]:
    """Rewards as they are; records how many."""
    ctx.record("rows", len(rewards), kind="sum")
    return rewards
'''


DEAR = '''
from rlgraph.ops import Context, float32, op, samples


@op(measures={"price": "costs"})
def dear(ctx: Context, rewards: float32[samples], *, price: float = 0.1) -> float32[samples]:
    """Rewards that cost something."""
    ctx.record("cost", rewards.abs())
    return rewards - price * rewards.abs()
'''
