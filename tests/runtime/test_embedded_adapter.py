"""The embedded engine serves an adapter beside frozen weights: its own, or those of the train engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, objective, scored

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.shards import local
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.engines.transformers.fused import fused
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


def trained(tmp_path: Path, case: str, dtype: str = "float32") -> tuple[FsdpEngine, dict[str, Any]]:
    """A train engine, and the settings of engines that serve its adapter."""
    family, targets = CASES[case]
    path, lora = str(build(tmp_path, family)), {"rank": 8, "alpha": 12.0, "targets": targets}
    train = FsdpEngine.of(path, optimizer={"lr": 3e-2}, lora=lora, dtype=dtype)
    return train, {"path": path, "dtype": dtype, "adapter": lora, "max_rows": 2}


def frozen_of(engine: TransformersEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights.items()}


def generated(engine: TransformersEngine) -> list[tuple[list[int], list[float]]]:
    samples = engine.generate(REQUESTS, Sampling(6))
    return [(one.tokens, one.logprobs) for of_prompt in samples for one in of_prompt]


@pytest.mark.parametrize("case", CASES)
def test_on_the_weights_of_the_train_engine_it_generates_as_on_its_own(
    one_rank: None, tmp_path: Path, case: str
) -> None:
    train, settings = trained(tmp_path, case)
    apart, shared = TransformersEngine(**settings), TransformersEngine(**settings, base=train.lend())
    merged = TransformersEngine(train.path, max_rows=2)
    assert (shared.fused is None) == (case not in ("fused kernels", "biases"))
    gaps, ref = [], FsdpEngine.of(train.path, frozen=True, base=train)
    for version in range(3):
        for engine in apart, shared:
            engine.load_weights(train.adapter(), version)
            assert engine.version == version
        found = generated(shared)
        assert found == generated(apart)
        merged.load_weights(train.weights(), version)
        for (tokens, own), (others, other) in zip(found, generated(merged), strict=True):
            assert tokens == others
            torch.testing.assert_close(torch.tensor(own), torch.tensor(other), rtol=1e-5, atol=1e-5)
        tokens, own = found[0]
        rows = Ragged.of([[*REQUESTS[0].prompt, *tokens]])
        mask = Ragged.of([[False] * 4 + [True] * len(tokens)], torch.bool)
        scores = train.logprobs(rows, mask).values[4:]
        torch.testing.assert_close(scores, torch.tensor(own), rtol=1e-4, atol=1e-4)
        gaps.append((ref.logprobs(rows, mask).values[4:] - torch.tensor(own)).abs().max())
        train.update(scored(), objective, torch.arange(3), 3)
    assert gaps[0] < 1e-4 and gaps[2] > 1e-2


def bases(engine: TransformersEngine) -> set[int]:
    """The addresses of the weights with which an engine generates, without its adapter."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in engine.model.parameters()}
    return addresses - {tensor.data_ptr() for tensor in engine.adapter.values()}


def held(engine: FsdpEngine) -> set[int]:
    frozen = [local(p) for p in engine.model.parameters() if not p.requires_grad]
    return {tensor.untyped_storage().data_ptr() for tensor in frozen}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("fused kernels", "float32"), ("biases", "bfloat16"), ("transposed experts", "float32")],
)
def test_frozen_weights_lie_in_one_place_and_stay_as_they_are(
    one_rank: None, tmp_path: Path, case: str, dtype: str
) -> None:
    train, settings = trained(tmp_path, case, dtype)
    served = TransformersEngine(**settings, base=train.lend())
    assert bases(served) == held(train)
    before = frozen_of(served)
    for version in range(3):
        served.load_weights(cast(train.adapter(dtype), getattr(torch, dtype)), version)
        generated(served)
        train.update(scored(), objective, torch.arange(3), 3)
    assert bases(served) == held(train)
    assert all(tensor.equal(before[name]) for name, tensor in served.weights.items())


def test_an_older_version_is_served_while_the_adapter_goes_on(one_rank: None, tmp_path: Path) -> None:
    train, settings = trained(tmp_path, "fused kernels")
    served = TransformersEngine(**settings, base=train.lend())
    train.update(scored(), objective, torch.arange(3), 3)
    served.load_weights(train.adapter(), 1)
    found = generated(served)
    for _ in range(3):
        train.update(scored(), objective, torch.arange(3), 3)
        assert generated(served) == found
    served.load_weights(train.adapter(), 4)
    assert generated(served) != found
    served.load_pretrained()
    assert generated(served) == generated_by_files(train.path)


def generated_by_files(path: str) -> list[tuple[list[int], list[float]]]:
    engine = TransformersEngine(path, max_rows=2)
    engine.fused = fused(engine.model, joins=False)
    engine.load_pretrained()
    return generated(engine)


def test_it_refuses_to_generate_while_the_weights_are_off_the_device(one_rank: None, tmp_path: Path) -> None:
    train, settings = trained(tmp_path, "biases")
    train.offload(["parameters"])
    served = TransformersEngine(**settings, base=train.lend())  # as a worker that starts with them away
    with pytest.raises(RuntimeError, match="generate needs its parameters, offloaded now"):
        generated(served)
    train.reload(["parameters"])
    served.load_weights(train.adapter(), 0)
    found = generated(served)
    for _ in range(2):
        train.offload(["parameters", "optimizer"])
        with pytest.raises(RuntimeError, match="generate needs its parameters, offloaded now"):
            generated(served)
        train.reload(["parameters", "optimizer"])
        assert generated(served) == found


def test_what_an_adapter_can_not_is_refused(one_rank: None, tmp_path: Path) -> None:
    train, settings = trained(tmp_path, "biases")
    served = TransformersEngine(**settings)
    with pytest.raises(RuntimeError, match="no weights yet"):
        generated(served)
    served.load_weights(train.adapter(), 0)
    with pytest.raises(RuntimeError, match="weights can't sleep: a sync brings an adapter alone"):
        served.sleep(["weights"])
    some = list(train.adapter())
    with pytest.raises(ValueError, match=r"1 of 8 weights were not given: base_model.*down_proj.lora_B"):
        served.load_weights(some[:-1], 1)
    assert served.version == -1
    with pytest.raises(ValueError, match=r"weight 'base_model.*other.*' is not in the model"):
        served.load_weights([(name.replace("mlp", "other"), tensor) for name, tensor in some], 1)
