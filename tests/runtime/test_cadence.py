"""Runs whose steps are left out of some iterations: what is trained, what is read, what a resume gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cadenced import checkpoint, graph, ran, same, versions
from safetensors.torch import load_file

APART = "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def trained(lines: list[dict[str, Any]], node: str) -> list[int]:
    """The iterations in which an update ran."""
    return [line["step"] for line in lines if f"{node}/loss" in line]


ONE = "set: {pools: {main: {devices: 1}}}"
PPO = (
    "set: {models.critic.path: demo_files/model, update_policy.minibatches: 1, update_critic.minibatches: 1}",
    "set: {shaped.beta: 0}",
)
DECOUPLED = "replace: {update_policy.loss: {kind: decoupled_ppo}}"
GRPO = (ONE, "set: {update_policy.minibatches: 1, update_policy.kl_coef: 0}")


def test_a_critic_is_warmed_up_before_the_policy_trains() -> None:
    lines = ran(graph("ppo", ONE, *PPO, "set: {update_policy.from: 3}"), "warm")
    assert trained(lines, "update_critic") == [1, 2, 3, 4]
    assert trained(lines, "update_policy") == [3, 4]
    assert [(v["critic"], v["policy"]) for v in versions("warm")] == [(1, 0), (2, 0), (3, 1), (4, 2)]
    base = load_file("demo_files/model/model.safetensors")
    assert same(checkpoint("warm", 2), base)
    assert not same(checkpoint("warm", 3), base)


@pytest.mark.parametrize(
    ("edits", "steps"),
    [
        pytest.param((ONE,), 1, marks=pytest.mark.nightly, id="in turns"),
        pytest.param((APART, DECOUPLED), 2, id="ahead"),
    ],
)
def test_resuming_gives_the_same(edits: tuple[str, ...], steps: int) -> None:
    path = graph("ppo", *edits, *PPO, "set: {update_policy.every: 2}")
    whole = ran(path, "whole")
    assert trained(whole, "update_policy") == [2, 4]
    shutil.copytree("whole", "cut")
    for later in range(steps + 1, 5):
        shutil.rmtree(f"cut/checkpoints/step-{later:06d}")
    assert ran(path, "cut", resume=True) == whole
    assert same(checkpoint("cut", 4), checkpoint("whole", 4))
    assert versions("cut") == versions("whole")


def test_generation_ahead_reads_the_weights_of_the_iteration_before() -> None:
    unsaved = "set: {schedule: {iterations: 5, buffer: {staleness: 1, by: batch}}}"
    path = graph(
        "ppo", APART, *PPO, DECOUPLED, "set: {update_policy.every: 3, update_policy.from: 2}", unsaved
    )
    lines = ran(path, "ahead")
    assert trained(lines, "update_policy") == [2, 5]
    # no update came just before: the rows are of the very weights that they train
    assert all(line["update_policy/rollout_gap_max"] < 1e-4 for line in lines if line["step"] in (2, 5))


def test_two_updates_an_iteration_are_two_epochs() -> None:
    second = "add: {again: {op: update.policy, model: policy, loss: {kind: ppo_clip}, "
    second += "aggregate: seq-mean-token-mean}}"
    ran(graph("grpo", *GRPO, second), "nodes", steps=1)
    ran(graph("grpo", *GRPO, "set: {update_policy.epochs: 2}"), "epochs", steps=1)
    assert same(checkpoint("nodes", 1), checkpoint("epochs", 1))
    assert versions("nodes")[-1]["policy"] == 2


@pytest.mark.slow
def test_numbers_that_change_are_those_of_their_iteration() -> None:
    changes = [
        "set: {update_policy.minibatches: 1}",
        "set: {update_policy.kl_coef: {linear: [0.4, 0.0], over: 2}}",
        "set: {update_policy.loss.clip: {steps: {1: 0.2, 2: 0.1}}}",
        "set: {rollout.temperature: {steps: {1: 1, 3: 0.5}}}",
        "set: {rollout.max_new_tokens: {steps: {1: 6, 2: 3}}}",
        "set: {models.policy.optimizer.lr: {cosine: [1e-3, 5e-4], over: 2}}",
    ]
    lines = ran(graph("grpo", ONE, *changes), "change")
    assert [line["update_policy/kl_coef"] for line in lines] == pytest.approx([0.4, 0.2, 0.0, 0.0])
    assert [line["update_policy/lr"] for line in lines] == pytest.approx([1e-3, 7.5e-4, 5e-4, 5e-4])
    assert [line["rollout/temperature"] for line in lines] == [1, 1, 0.5, 0.5]
    assert [line["update_policy/temperature"] for line in lines] == [1, 1, 0.5, 0.5]
    assert [line["update_policy/clip"] for line in lines] == [0.2, 0.1, 0.1, 0.1]
    assert lines[0]["rollout/length"] > 3 >= max(line["rollout/length"] for line in lines[1:])
    fixed = "set: {update_policy.kl_coef: 0.4, rollout.temperature: 1, rollout.max_new_tokens: 6}"
    ran(graph("grpo", ONE, changes[0], fixed), "fixed", steps=1)
    assert same(checkpoint("fixed", 1), checkpoint("change", 1))
    for later in (3, 4):
        shutil.rmtree(f"change/checkpoints/step-{later:06d}")
    assert ran(graph("grpo", ONE, *changes), "change", resume=True) == lines
