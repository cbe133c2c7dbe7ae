"""The planner's peaks against what the train engine holds on fake tensors (benchmarks/memory_fake.py)."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fake_engine
import memory_fake
from fake_engine import Setting

from rlgraph.costs.memory import EngineComponent
from share import rest_nightly

EIGHT, MIXTURE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
EXPERTS = Setting(MIXTURE, lora=32, targets=("o_proj", "experts.gate_up_proj", "experts.down_proj"))
LONG = Setting(EIGHT, tokens=32768, row=32768)
FEW_HEADS = Setting(MIXTURE, world=16, sequence=16, tokens=2**15, row=2**15)
RINGS = (
    replace(LONG, world=64, sequence=64, tokens=2**18, row=2**18),
    replace(LONG, world=16, sequence=16, tokens=2**17, row=2**17, recompute=False),
    replace(LONG, world=16, sequence=16, step="logprobs"),
    Setting(EIGHT, world=16, sequence=16, packed="varlen", recompute=False),
    Setting(EIGHT, world=16, sequence=16, packed="mask", recompute=False),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting(EIGHT, world=64),
        Setting(EIGHT, tokens=16384, recompute=False, packed="mask"),
        pytest.param(
            Setting(EIGHT, tokens=16384, recompute=False, packed="varlen"), marks=pytest.mark.nightly
        ),
        pytest.param(Setting(EIGHT, tokens=4096, recompute=False, lora=32), marks=pytest.mark.nightly),
        Setting(EIGHT, world=64, step="logprobs", tokens=4096),
        Setting(EIGHT, step="sync", lora=32),
        pytest.param(replace(EXPERTS, tokens=4096, recompute=False), marks=pytest.mark.nightly),
        pytest.param(replace(EXPERTS, step="sync"), marks=pytest.mark.nightly),
        *(
            pytest.param(replace(EXPERTS, **other), marks=pytest.mark.nightly)
            for other in ({}, {"lora": 128}, {"step": "logprobs"}, {"targets": EXPERTS.targets[-1:]})
        ),
        pytest.param(Setting(MIXTURE, world=512, step="logprobs"), marks=pytest.mark.nightly),
        Setting(MIXTURE, tokens=4096, recompute=False),
        *(pytest.param(replace(LONG, sequence=ranks), marks=pytest.mark.nightly) for ranks in (1, 2, 8)),
        pytest.param(replace(LONG, sequence=4, recompute=False), marks=pytest.mark.nightly),
        replace(LONG, world=16, sequence=16),
        *(pytest.param(setting, marks=pytest.mark.nightly) for setting in RINGS),
        pytest.param(replace(LONG, sequence=8, step="ref"), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, sequence=4, packed="mask", recompute=False), marks=pytest.mark.nightly),
        pytest.param(replace(LONG, model=MIXTURE, world=16, sequence=16), marks=pytest.mark.nightly),
        Setting(MIXTURE, step="sync"),
        pytest.param(Setting(EIGHT, optimizer="muon", tokens=4096), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, world=64, optimizer="muon"), marks=pytest.mark.nightly),
        Setting(EIGHT, wide=True, tokens=4096),
        pytest.param(Setting(EIGHT, wide=True, step="logprobs", tokens=4096), marks=pytest.mark.nightly),
        pytest.param(Setting("Qwen/Qwen2.5-0.5B", wide=True, world=1), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, world=64, shard=8), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, optimizer_offload=True), marks=pytest.mark.nightly),
        Setting(EIGHT, optimizer_offload=True, activation_offload=True),
        pytest.param(replace(LONG, activation_offload=True, sequence=2), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, world=64, activation_offload=True), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, optimizer_offload=True), marks=pytest.mark.nightly),
        pytest.param(
            Setting(EIGHT, world=64, optimizer_offload=True, step="logprobs", tokens=4096),
            marks=pytest.mark.nightly,
        ),
        pytest.param(Setting(EIGHT, optimizer_offload=True, step="sync"), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, world=64, shard=8, optimizer_offload=True), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, world=16, shard=8), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, world=1024, shard=64), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, world=64, shard=8, step="sync"), marks=pytest.mark.nightly),
        Setting(EIGHT, tensor=2),
        pytest.param(Setting(EIGHT, tensor=8, step="ref"), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, tensor=2, step="sync"), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, tensor=2, tokens=4096, recompute=False), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, tensor=4, step="logprobs"), marks=pytest.mark.nightly),
        Setting(EIGHT, tensor=8, step="logprobs"),
        pytest.param(Setting("Qwen/Qwen3-32B", world=64, tensor=8), marks=pytest.mark.nightly),
        Setting(MIXTURE, world=64, experts=8, tokens=4096),
        pytest.param(Setting(MIXTURE, world=64, experts=8, step="logprobs"), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, experts=2, step="sync"), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, experts=2, tokens=4096, recompute=False), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, world=64, shard=8, experts=4, step="ref"), marks=pytest.mark.nightly),
        pytest.param(Setting("meta-llama/Llama-3.1-8B", tensor=4), marks=pytest.mark.nightly),
    ],
    ids=memory_fake.name_of,
)
def test_a_predicted_peak_is_what_the_engine_holds(setting: Setting) -> None:
    held, (counted, _) = fake_engine.measured(setting), memory_fake.predicted(setting)
    assert memory_fake.LOW <= counted.total() / held.total() <= memory_fake.HIGH
    for part in counted | held:  # torch 2.15 gathers a layer less of experts with LoRA than 2.13: 2.7 %
        assert counted[part] == pytest.approx(held[part], abs=0.03 * held.total()), part


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(EIGHT, world=8, shard=8, tokens=4096), marks=pytest.mark.nightly),
        Setting(EIGHT, world=64, shard=8, tokens=4096),
        Setting("Qwen/Qwen3-1.7B", tokens=4096),
        pytest.param(
            Setting(EIGHT, world=64, shard=8, tokens=4096, step="logprobs"), marks=pytest.mark.nightly
        ),
        pytest.param(Setting(EIGHT, world=64, shard=8, step="sync"), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, tokens=4096, lora=32), marks=pytest.mark.nightly),
        pytest.param(replace(EXPERTS, tokens=4096), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, world=32, shard=8, tokens=4096), marks=pytest.mark.nightly),
        Setting("Qwen/Qwen3-32B", tensor=2, tokens=4096),
        pytest.param(Setting(EIGHT, tensor=2, tokens=4096, step="logprobs"), marks=pytest.mark.nightly),
        pytest.param(Setting(EIGHT, tensor=2, step="sync"), marks=pytest.mark.nightly),
        Setting(MIXTURE, experts=8, tokens=4096),
        pytest.param(Setting(MIXTURE, world=64, experts=8, step="logprobs"), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, world=64, shard=8, experts=8, tokens=4096), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, experts=2, step="sync"), marks=pytest.mark.nightly),
        pytest.param(
            Setting("Qwen/Qwen3-32B", tensor=2, tokens=4096, recompute=False), marks=pytest.mark.nightly
        ),
    ],
    ids=memory_fake.name_of,
)
def test_predicted_bytes_are_what_the_engine_receives(setting: Setting) -> None:
    counted, received = memory_fake.predicted_bytes(setting), fake_engine.collected(setting)
    assert counted == pytest.approx(received, rel=1e-3)


@pytest.mark.parametrize(
    "setting",
    [
        replace(LONG, world=16, sequence=16),
        *(pytest.param(setting, marks=pytest.mark.nightly) for setting in (*RINGS[:3], FEW_HEADS)),
    ],
    ids=memory_fake.name_of,
)
def test_exchanges_of_rings_are_what_is_predicted(setting: Setting) -> None:
    counted, received = memory_fake.predicted_bytes(setting), fake_engine.collected(setting)
    assert counted["alltoall_base_"] == received["alltoall_base_"] > 0


@pytest.mark.parametrize(
    "setting",
    [
        Setting(EIGHT, optimizer="muon"),
        pytest.param(Setting(EIGHT, world=1, optimizer="muon", dtype="float32"), marks=pytest.mark.nightly),
        pytest.param(Setting(MIXTURE, optimizer="muon"), marks=pytest.mark.nightly),
    ],
    ids=memory_fake.name_of,
)
def test_an_optimizer_step_holds_what_is_predicted(setting: Setting) -> None:
    footprint, step = memory_fake.priced(setting)
    held, counted = fake_engine.stepped(setting), footprint.passing(step)["optimizer step"]
    averages = footprint.items("main")[EngineComponent("policy", "train", "optimizer")]
    assert averages == pytest.approx(held["optimizer"], rel=1e-3)
    for part, size in counted.items():
        assert size == pytest.approx(held[part], rel=1e-3), part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world"),
    rest_nightly(  # by day the one with the most kinds of matrices
        [("qwen2", 8), ("qwen2", 1), ("qwen3_moe", 8), ("gpt_oss", 8)],
        lambda family, world: (family, world) == ("qwen3_moe", 8),
    ),
)
def test_a_step_of_muon_receives_what_is_predicted(tmp_path: Path, family: str, world: int) -> None:
    setting = Setting(small(tmp_path, 4, 64_000, family), world=world, optimizer="muon", recompute=False)
    counted, received = memory_fake.predicted_bytes(setting), fake_engine.collected(setting, whole=True)
    assert counted["alltoall_base_"] == received["alltoall_base_"]
    assert (received["alltoall_base_"] > 0) == (world > 1)


@pytest.mark.slow
def test_a_few_layers_say_what_all_of_them_hold(tmp_path: Path) -> None:
    setting = Setting(small(tmp_path, layers=9, vocabulary=200_000), world=64, tokens=4096)
    few, whole = (fake_engine.measured(setting, whole) for whole in (False, True))
    assert few.total() == pytest.approx(whole.total(), rel=1e-3)


@pytest.mark.slow
def test_a_small_model_is_gathered_whole(tmp_path: Path) -> None:
    update = Setting(small(tmp_path, layers=4, vocabulary=64_000), recompute=False)
    for setting in (update, replace(update, step="logprobs"), replace(update, step="sync")):
        held, (counted, _) = fake_engine.measured(setting), memory_fake.predicted(setting)
        assert memory_fake.LOW <= counted.total() / held.total() <= memory_fake.HIGH, setting.step


def small(folder: Path, layers: int, vocabulary: int, family: str = "qwen2") -> str:
    """A folder with the configuration of a model; 2**26 parameters are the most that are gathered whole."""
    widths = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    more = {"num_hidden_layers": layers, "tie_word_embeddings": True, **heads}
    (folder / "config.json").write_text(json.dumps({"model_type": family, **widths, **more}))
    return str(folder)
