"""Estimators and losses of shipped graphs take one step on any number of devices, in any micro-batches."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ran import metrics
from test_shipped import _folder as _folder
from test_shipped import tiny

GRAPHS = ("maxrl", "fipo", "vespo", "iw_opd", "best_of_n", "simpo", "orpo", "kto", "reward_model")
READ = ("update_", "advantages", "best", "preference", "reward/")


def settings(graph: str) -> list[str]:
    """Settings of a small run, whose rewards are of what an untrained model does write sometimes."""
    chosen = [each for each in tiny(graph) if not each.startswith(("rollout.n=", "models.teacher."))]
    if "prompts.batch=3" not in chosen:
        return chosen
    if graph == "iw_opd":
        return [*chosen, "rollout.n=4", f"models.teacher.path={noisy(Path('demo_files/model'))}"]
    return [*chosen, "rollout.n=4", "rewards={op: reward.format, pattern: '.*[0-4].*'}"]


def noisy(path: Path) -> Path:
    """A copy of a model with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(path, "noisy")
    weights = load_file("noisy/model.safetensors")
    draw = torch.Generator().manual_seed(1)
    moved = {n: w + 0.1 * torch.randn(w.shape, generator=draw).to(w.dtype) for n, w in weights.items()}
    save_file(moved, "noisy/model.safetensors", metadata={"format": "pt"})
    return Path("noisy")


@pytest.mark.parametrize("graph", GRAPHS)
def test_an_iteration_is_the_same_on_one_device_and_on_two(
    graph: str, run_on_devices: Callable[..., str]
) -> None:
    once = [graph, *settings(graph), "--steps", "1"]
    run_on_devices(*once, "--devices", "1", "--inline", "--run-dir", "one")
    cut = [f"models.{model}.train.micro_tokens=24" for model in trained(graph)]
    run_on_devices(*once, *cut, "--devices", "2", "--run-dir", "two")
    (one,), (two,) = metrics("one"), metrics("two")
    # in kto's first step the policy is the reference: its margins are rounding, and their signs chance
    names = [
        name for name in one if name.startswith(READ) and (graph, name) != ("kto", "preference/accuracy")
    ]
    assert [one[name] > 0 for name in names if name.endswith("/grad_norm")] == [True]
    for name in names:
        assert math.isfinite(one[name])
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


def test_several_losses_of_pairs_are_the_same_on_one_device_and_on_two(
    run_on_devices: Callable[..., str],
) -> None:
    losses = "{dpo: {kind: sigmoid, smoothing: 0.1}, sorted: {kind: aot}, fit: {kind: likelihood}}"
    more = (f"preference.losses={losses}", "preference.weights={fit: 0.5}", "preference.divergence=js")
    once = ["dpo", *settings("dpo"), *more, "--steps", "1"]
    run_on_devices(*once, "--devices", "1", "--inline", "--run-dir", "one")
    cut = [f"models.{model}.train.micro_tokens=24" for model in trained("dpo")]
    run_on_devices(*once, *cut, "--devices", "2", "--run-dir", "two")
    (one,), (two,) = metrics("one"), metrics("two")
    parts = [one[f"preference/loss_{name}"] for name in ("dpo", "sorted", "fit")]
    assert one["preference/loss"] == pytest.approx(parts[0] + parts[1] + 0.5 * parts[2], rel=1e-4)
    assert one["update_policy/grad_norm"] > 0
    for name in (name for name in one if name.startswith(READ)):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


def test_ppo_reads_the_reward_model_that_a_run_makes(run_on_devices: Callable[..., str]) -> None:
    once = ("--steps", "1", "--devices", "1", "--inline")
    run_on_devices("reward_model", *settings("reward_model"), *once, "--run-dir", "made")
    read = [each for each in settings("rm_ppo") if not each.startswith(("rewards=", "models.reward."))]
    run_on_devices("rm_ppo", *read, "models.reward.path=made/models/reward", *once, "--run-dir", "read")
    assert metrics("read")[0]["update_policy/grad_norm"] > 0


def trained(graph: str) -> list[str]:
    from rlgraph.frontend.compose import compose

    models = compose(graph).plain()["models"]
    return [name for name, model in models.items() if "optimizer" in model]
