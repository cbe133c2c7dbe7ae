"""Runs of models whose frozen weights another holds: less memory, and the numbers of models apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_residency import tight

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Target
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
LORA = "set: {models.policy.train.lora: {rank: 2, alpha: 8}}"
KL = "set: {update_policy.kl_coef: 0.1}"
TEACHER = "add: {models.teacher: {path: demo_files/model, frozen: true}}"
SCORES = "add: {teacher_logprobs: {op: logprobs, model: teacher}}"
DISTILL = "replace: {advantages: {op: advantage.distill}}"
LOOP = "set: {update_policy.minibatches: 2, update_critic.minibatches: 2, schedule.save_every: 1}"
DATA = "demo_files/train.parquet"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    for copy in "same", "more":
        shutil.copytree("demo_files/model", copy)


def graph(reference: str, *edits: str, base: str = "grpo") -> str:
    """A graph on the demo's model, with a reference that is read from a directory."""
    settings = [
        "set: {models.policy: {path: demo_files/model, optimizer: {lr: 3e-2}}, rollout.max_new_tokens: 8}",
        f"replace: {{prompts: {{op: data.prompts, files: [{DATA}], batch: 5, template: plain}}}}",
        f"set: {{rollout.n: 3, schedule.iterations: 3, models.ref.path: {reference}}}",
        f"set: {{rewards: {{op: '{HERE / 'ones_ops.py'}:ones'}}}}",
    ]
    body = "".join(f"  - {edit}\n" for edit in (*settings, *edits))
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\nedits:\n{body}")
    return "edited.yaml"


def measured(reference: str, *edits: str) -> list[dict[str, float]]:
    run_dir = Path(f"run-{reference.replace('/', '-')}")
    run_graph(graph(reference, *edits), (), 1, inline=True, run_dir=run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/", "tokens/", "perf/"))}
        for line in lines
    ]


@pytest.mark.slow
def test_a_reference_is_on_the_weights_of_an_adapted_policy() -> None:
    shared = compile_graph(graph("demo_files/model", LORA, KL))
    apart = compile_graph(graph("same", LORA, KL))
    assert (shared.models["ref"].shares, apart.models["ref"].shares) == ("policy", "")
    one, two = measured("demo_files/model", LORA, KL), measured("same", LORA, KL)
    assert one == two
    assert one[-1]["update_policy/kl_ref"] > 0, "the policy has left its reference"


@pytest.mark.slow
def test_frozen_models_of_the_same_weights_are_one() -> None:
    teaching = (TEACHER, SCORES, DISTILL, KL)
    shared, apart = (compile_graph(graph(path, *teaching)) for path in ("demo_files/model", "same"))
    assert {name for name, model in shared.models.items() if model.shares} == {"teacher"}
    assert not any(model.shares for model in apart.models.values())
    one, two = measured("demo_files/model", *teaching), measured("same", *teaching)
    assert one == two


def test_what_is_shared_takes_no_memory() -> None:
    target = Target("h100-8")
    shared = compile_graph(graph("demo_files/model", LORA, KL), target=target)
    apart = compile_graph(graph("same", LORA, KL), target=target)
    held = [plan.peak["main"].parts["weights"] for plan in (shared, apart)]
    assert held[0] < held[1]


def ppo(critic: str, reference: str) -> str:
    """PPO in which the policy and the critic have an adapter each."""
    critic = f"set: {{models.critic.path: {critic}, models.critic.train.lora: {{rank: 4, alpha: 8}}}}"
    return graph(reference, LORA, critic, LOOP, base="ppo")


def run_ppo(name: str, *paths: str, devices: int = 1, settings: Sequence[str] = (), **how: Any) -> list[Any]:
    """Run it; its metrics, and the files of its last checkpoint."""
    path = ppo(*paths)
    where = {"cluster": tight(path)} if how.pop("is_tight", False) else {}
    target = Target(where["cluster"]) if where else None
    run_graph(path, settings, devices, run_dir=Path(name), target=target, **how)
    lines = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    saved = sorted(Path(name, "checkpoints/step-000003").glob("*/shard-*"))
    timed = ("time/", "memory/", "tokens/", "perf/")
    return [
        [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines],
        {file.parent.name + file.name: load_file(file) for file in saved},
    ]


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether metrics, and all that trained with its averages, are equal bit for bit."""
    pairs = [(one[1][file], other[1][file]) for file in one[1].keys() | other[1].keys()]
    return one[0] == other[0] and all(
        a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a) for a, b in pairs
    )


@pytest.mark.slow
def test_a_policy_a_critic_and_a_reference_train_on_one_set_of_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlgraph.costs.limits.PREFILL", 1)  # it would hide what such small models hold
    apart = run_ppo("apart", "same", "more", inline=True)
    assert not any(model["shares"] for model in plan_of("apart")["models"].values())
    shared = run_ppo("shared", "demo_files/model", "demo_files/model", inline=True)
    shares = {name: model["shares"] for name, model in plan_of("shared")["models"].items()}
    assert shares == {"policy": "", "ref": "policy", "critic": "policy"}
    assert same(shared, apart) and len(shared[1]) == 2, (
        "adapters of the policy, adapters and head of the critic"
    )
    moved = run_ppo("moved", "demo_files/model", "demo_files/model", inline=True, is_tight=True)
    moves = {(step["kind"], *step["models"]) for step in plan_of("moved")["steps"] if step["parts"]}
    assert {("offload", "policy"), ("load", "policy")} <= moves
    assert same(moved, apart)
    shutil.rmtree("shared/checkpoints/step-000003")
    assert same(run_ppo("shared", "demo_files/model", "demo_files/model", inline=True, resume=True), apart)


@pytest.mark.nightly
@pytest.mark.usefixtures("workers")
def test_so_they_do_on_two_devices() -> None:
    apart = run_ppo("apart", "same", "more", devices=2)
    shared = run_ppo("shared", "demo_files/model", "demo_files/model", devices=2)
    assert same(shared, apart) and len(shared[1]) == 4


def plan_of(run_dir: str) -> dict[str, Any]:
    return json.loads(Path(run_dir, "plan.json").read_text())
