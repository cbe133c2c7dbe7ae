"""Whole runs on four devices: replicas of its models, killed and resumed in one copy; tokens shared; layers
divided, and whole again; experts divided."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_faults import ONE, inline, lines, with_traps

from rlgraph.runtime.demo import make_tokenizer, model_config
from rlgraph.runtime.engines.fsdp.load import quiet
from rlgraph.runtime.replay import replay

pytestmark = pytest.mark.usefixtures("in_demo")
LENGTH = "schedule={iterations: 4, save_every: 1, record_every: 1}"
TWENTY = "schedule={iterations: 20, save_every: 5}"
SAME = 1e-3  # of what weights moved, they may be apart: AdamW divides by the size of small gradients
MESHES: dict[str, dict[str, int]] = {  # of four devices, as settings of each model's train engine
    "shard 4": {},
    "shard 2 x 2 replicas": {"shard": 2},
    "shard 2 x 2 replicas, rows over 2": {"shard": 2, "sequence_parallel": 2},
    # its model has two key heads
    "shard 2 x 2 replicas, rows over 4 in rings of 2": {"shard": 2, "sequence_parallel": 4},
}
MIXTURES: dict[str, dict[str, int]] = {  # the same of a model with experts
    "experts 2 x shard 2": {"expert_parallel": 2},
    "shard 4": {},
    "experts 2 x 2 replicas, rows over 2": {"shard": 2, "expert_parallel": 2, "sequence_parallel": 2},
    "experts 4": {"expert_parallel": 4},
}


def of_both(setting: str) -> list[str]:
    return [f"models.{name}.train.{setting}" for name in ("policy", "ref")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "mesh", "ranks", "others"),
    [
        (of_both("shard=2"), "2-way shard x 2 replicas", 2, "models.policy.train.shard=4"),
        (
            of_both("tensor_parallel=2"),
            "2-way shard x 2-way tensor",
            4,
            "models.ref.train.tensor_parallel=2",
        ),
    ],
    ids=["replicas", "tensor"],
)
def test_a_mesh_that_is_killed_goes_on_in_one_copy_with_the_numbers_of_one_device(
    settings: list[str], mesh: str, ranks: int, others: str, run_on_devices: Callable[..., str]
) -> None:
    graph, token = with_traps(ONE, main={"policy": 3}), uuid.uuid4().hex
    four = (LENGTH, "--devices", "4", "--run-dir", "a")
    said = run_on_devices(graph, *settings, *four, expect=1, RLGRAPH_TEST_TOKEN=token)
    assert "run update_policy" in said
    assert f"fsdp (float32, {mesh})" in Path("a/plan.txt").read_text()
    saved = max(Path("a/checkpoints").glob("step-*"))
    shards = sorted(path.name for path in (saved / "policy").glob("shard-*"))
    assert shards == [f"shard-{rank:05}-of-{ranks:05}.safetensors" for rank in range(ranks)]
    run_on_devices(graph, others, *four, "--resume", RLGRAPH_TEST_TOKEN=token)
    inline(ONE, LENGTH, run_dir="b")
    for there, here in zip(lines("a"), lines("b"), strict=True):
        assert there == pytest.approx(here, rel=1e-4, abs=1e-4)
    assert "update_policy" in str(replay(Path("a"), 4, "update_policy"))  # on one device, whatever the mesh


@pytest.mark.nightly
def test_a_whole_run_on_four_devices_is_that_of_ranks_that_share_nothing(
    run_on_devices: Callable[..., str],
) -> None:
    run_on_devices(ONE, LENGTH, "--devices", "4", "--run-dir", "plain")
    run_on_devices(ONE, LENGTH, "--devices", "4", "--run-dir", "shared", *of_both("sequence_parallel=2"))
    plain, found = lines("plain"), lines("shared")
    assert [line.keys() for line in found] == [line.keys() for line in plain]
    for one, other in zip(plain, found, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-4)
    assert "update_policy" in str(replay(Path("shared"), 4, "update_policy"))  # on one device


def settings_of(mesh: dict[str, int]) -> list[str]:
    return [setting for key, value in mesh.items() for setting in of_both(f"{key}={value}")]


def with_experts() -> str:
    """The folder of a mixture that reads and writes what the demo's model does."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    tokenizer = make_tokenizer()
    dense = model_config(tokenizer).to_dict()
    fields = {key: dense[key] for key in dense.keys() - {"model_type", "architectures", "layer_types"}}
    few = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**{**fields, **few, "head_dim": 32}))
        model.save_pretrained("mixture")
    tokenizer.save_pretrained("mixture")
    return str(Path("mixture").resolve())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("meshes", "mesh"), [(meshes, mesh) for meshes in (MESHES, MIXTURES) for mesh in meshes]
)
def test_twenty_iterations_on_a_mesh_killed_and_on_another_end_with_the_weights_of_one_rank(
    meshes: dict[str, dict[str, int]], mesh: str, run_on_devices: Callable[..., str]
) -> None:
    graph, token = with_traps(ONE, main={"policy": 11}), uuid.uuid4().hex
    path = with_experts() if meshes is MIXTURES else os.environ["RLGRAPH_TEST_FILES"] + "/model"
    same = [TWENTY, *(f"models.{name}.path={path}" for name in ("policy", "ref"))]
    four = (*same, "--devices", "4", "--run-dir", "a")
    said = run_on_devices(graph, *settings_of(meshes[mesh]), *four, expect=1, RLGRAPH_TEST_TOKEN=token)
    assert "run update_policy" in said
    after = dict(zip(meshes, [*meshes.values()][1:] + [*meshes.values()][:1], strict=True))[mesh]
    run_on_devices(graph, *settings_of(after), *four, "--resume", RLGRAPH_TEST_TOKEN=token)
    inline(ONE, *same, run_dir="b")
    assert [line["step"] for line in lines("a")] == [line["step"] for line in lines("b")]
    start = load_file(Path(path, "model.safetensors"))
    there, here = (load_file(Path(run, "models", "policy", "model.safetensors")) for run in ("a", "b"))
    assert distance(there, here) < SAME * distance(start, here)


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the L2 norm of the difference of all weights."""
    return math.sqrt(sum(float((weights[name] - others[name]).double().square().sum()) for name in weights))
