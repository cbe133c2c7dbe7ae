"""The embedded engine serves an adapter: syncs bring that alone, and it merges it into its own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, objective, scored

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.engines.weights.transfer import cast

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[str, Any]] = {
    "fused kernels": ("qwen3", "all-linear"),
    "biases": ("qwen2", ["q_proj", "down_proj"]),
    "experts": ("qwen3_moe", ["o_proj", *EXPERTS]),
    "one weight of experts": ("qwen3_moe", EXPERTS[:1]),
    "the other": ("gpt_oss", EXPERTS[1:]),
    "transposed experts": ("gpt_oss", ["q_proj", *EXPERTS]),
}
REQUESTS = [Request([5, 6, 7, 8], [1, 2, 3]), Request([9, 10], [4])]


def both(tmp_path: Path, case: str, dtype: str = "float32") -> tuple[FsdpEngine, TransformersEngine]:
    family, targets = CASES[case]
    path, lora = str(build(tmp_path, family)), {"rank": 8, "alpha": 12.0, "targets": targets}
    train = FsdpEngine.of(path, optimizer={"lr": 3e-2}, lora=lora, dtype=dtype)
    return train, TransformersEngine(path, dtype=dtype, adapter=lora, max_rows=2)


def weights_of(engine: TransformersEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights.items()}


@pytest.mark.parametrize("case", CASES)
def test_it_generates_as_with_merged_weights(one_rank: None, tmp_path: Path, case: str) -> None:
    train, served = both(tmp_path, case)
    merged = TransformersEngine(train.path, max_rows=2)
    assert (served.fused is None) == (case not in ("fused kernels", "biases"))
    begun, ref = [], FsdpEngine.of(train.path, frozen=True, base=train)
    for version in range(3):
        served.load_weights(train.adapter(), version)
        merged.load_weights(train.weights(), version)
        assert served.version == version
        wanted = weights_of(merged)
        assert all(tensor.equal(wanted[name]) for name, tensor in served.weights.items())
        for own, other in zip(*(e.generate(REQUESTS, Sampling(6)) for e in (served, merged)), strict=True):
            assert [(one.tokens, one.logprobs) for one in own] == [
                (one.tokens, one.logprobs) for one in other
            ]
        ((one, *_), _) = served.generate(REQUESTS, Sampling(6))
        tokens = Ragged.of([[*REQUESTS[0].prompt, *one.tokens]])
        mask = Ragged.of([[False] * 4 + [True] * len(one.tokens)], torch.bool)
        own_logprobs = torch.tensor(one.logprobs)
        scores = train.logprobs(tokens, mask).values[4:]
        torch.testing.assert_close(scores, own_logprobs, rtol=1e-4, atol=1e-4)
        begun.append((ref.logprobs(tokens, mask).values[4:] - own_logprobs).abs().max())
        train.update(scored(), objective, torch.arange(3), 3)
    assert begun[0] < 1e-4 and begun[2] > 1e-2


def test_versions_replace_each_other_without_a_trace(one_rank: None, tmp_path: Path) -> None:
    train, served = both(tmp_path, "experts", "bfloat16")
    before = weights_of(served)
    for version in range(4):
        served.load_weights(cast(train.adapter("bfloat16"), torch.bfloat16), version)
        train.update(scored(), objective, torch.arange(3), 3)
    changed = {name for name, tensor in served.weights.items() if not tensor.equal(before[name])}
    assert changed == served.adapter.base.keys()  # type: ignore[union-attr]
    nothing = ((name, torch.zeros_like(tensor)) for name, tensor in train.adapter())
    served.load_weights(nothing, 9)
    assert all(tensor.equal(before[name]) for name, tensor in served.weights.items())


def test_what_an_adapter_can_not_is_refused(one_rank: None, tmp_path: Path) -> None:
    train, served = both(tmp_path, "biases")
    with pytest.raises(RuntimeError, match="no weights yet"):
        served.generate(REQUESTS, Sampling(2))
    served.load_weights(train.adapter(), 0)
    with pytest.raises(RuntimeError, match="weights can't sleep: a sync brings an adapter alone"):
        served.sleep(["weights"])
    some = list(train.adapter())
    with pytest.raises(ValueError, match=r"A or B is missing: base_model.*down_proj.lora_A"):
        served.load_weights(some[:-1], 1)
    with pytest.raises(ValueError, match=r"A or B is missing: model.layers.1.mlp.down_proj.weight"):
        served.load_weights(some[:-2], 1)
    assert served.version == -1
    with pytest.raises(AttributeError, match="other"):
        served.load_weights([(name.replace("mlp", "other"), tensor) for name, tensor in some], 1)
