"""Peaks and bytes of large models, planned, on fake ranks, and ideal (benchmarks/large_models.py)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import large_models
import memory_fake
from fake_engine import Setting
from memory_fake import HIGH, LOW, name_of

DENSE, MIXTURE, LARGE = "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"
LONG: dict[str, Any] = {"tokens": 65536, "row": 65536, "sequence": 8}


@pytest.mark.parametrize(
    "setting",
    [
        Setting("Qwen/Qwen3-8B", sequence=2, tokens=4096, step="logprobs"),
        *(
            pytest.param(setting, marks=pytest.mark.nightly)
            for setting in (
                Setting(DENSE, world=1024),
                Setting(DENSE, world=64, **LONG),
                Setting(DENSE, world=64, shard=8, step="logprobs", **LONG),
                Setting(MIXTURE, world=256),
                Setting(MIXTURE, world=1024, step="logprobs"),
                Setting(LARGE, world=256, shard=32, **LONG),
                Setting(LARGE, world=1024, shard=128),
            )
        ),
    ],
    ids=name_of,
)
def test_planned_bytes_and_peak_are_the_engines(setting: Setting) -> None:
    # a shard of experts is at least one of them: padding
    padding = 1 if "B-A" not in setting.model else max(1, (setting.shard or setting.world) // 128)
    rows = large_models.ratios(setting)
    assert {"peak", "all-gather"} <= rows.keys()
    for what, (planned, engine, ideal) in rows.items():
        if what == "peak":
            assert LOW <= planned / engine <= HIGH
        else:
            assert planned == pytest.approx(engine, rel=1e-3), what
        assert not ideal or 0.99 <= engine / ideal <= 1.05 * padding, what


@pytest.mark.parametrize(("world", "shard", "times"), [(256, None, 2), (1024, None, 8), (1024, 128, 1)])
@pytest.mark.parametrize("step", ["update", "logprobs"])
def test_a_mixture_of_fewer_experts_than_ranks_is_priced_with_its_padding(
    world: int, shard: int | None, times: int, step: str
) -> None:
    setting = Setting(MIXTURE, step, world, shard)
    planned, ideal = memory_fake.predicted_bytes(setting), large_models.ideal_bytes(setting)
    assert planned["_allgather_base_"] == pytest.approx(times * ideal["_allgather_base_"], rel=0.07)
