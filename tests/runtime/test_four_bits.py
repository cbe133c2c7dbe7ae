"""Frozen weights in 4 bits below an adapter, by bitsandbytes: what is held, and what is computed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, objective, scored
from safetensors.torch import load_file

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.memory.offload import distinct_storages
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.engines.weights.four_bit import FourBitLinear

IS_INSTALLED = find_spec("bitsandbytes") is not None
with_library = pytest.mark.skipif(not IS_INSTALLED, reason="bitsandbytes is not installed")
LORA = {"rank": 8, "alpha": 12.0, "quantize": "nf4"}
FAMILIES = ["llama", "qwen2", "phi3"]
REQUESTS = [Request([5, 6, 7, 8], [1, 2, 3]), Request([9, 10], [4])]


def trained(tmp_path: Path, family: str, dtype: str = "float32", **lora: Any) -> FsdpEngine:
    path = str(build(tmp_path, family))
    return FsdpEngine.of(path, optimizer={"lr": 3e-2}, lora={**LORA, **lora}, dtype=dtype)


def rounded(path: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The weights of a model's files, those of linear layers rounded to NF4 by bitsandbytes itself."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = {name: tensor.to(dtype) for name, tensor in load_file(Path(path, "model.safetensors")).items()}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
            weights[name] = dequantize_4bit(packed, state)
    return weights


@with_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_files_rounded_to_16_numbers(
    one_rank: None, tmp_path: Path, family: str, dtype: str
) -> None:
    train = trained(
        tmp_path, family, dtype, targets=["q_proj", "down_proj"] if family != "phi3" else "all-linear"
    )
    wanted, found = rounded(train.path, getattr(torch, dtype)), dict(train.weights())
    assert found.keys() == wanted.keys()
    assert all(tensor.equal(wanted[name]) for name, tensor in found.items())
    layers = [module for module in train.model.modules() if isinstance(module, FourBitLinear)]
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    held = sum(
        storage.nbytes()
        for storage in distinct_storages(p for layer in layers for p in (layer.packed, layer.scales))
    )
    assert numbers / 2 < held <= numbers / 2 + 4 * (numbers / 64 + len(layers))


@with_library
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_train_as_beside_the_rounded_weights(one_rank: None, tmp_path: Path, family: str) -> None:
    from safetensors.torch import save_file

    train = trained(tmp_path, family)
    path = build(tmp_path / "plain", family)
    save_file(rounded(train.path), path / "model.safetensors", metadata={"format": "pt"})
    plain = FsdpEngine.of(str(path), optimizer={"lr": 3e-2}, lora={**LORA, "quantize": None})
    for _ in range(3):
        for column in (train.logprobs(**scored()), plain.logprobs(**scored())):
            assert column.values.isfinite().all()
        torch.testing.assert_close(
            train.logprobs(**scored()).values, plain.logprobs(**scored()).values, rtol=1e-4, atol=1e-5
        )
        own, other = (one.update(scored(), objective, torch.arange(3), 3) for one in (train, plain))
        assert own == pytest.approx(other, rel=1e-4) and own["grad_norm"] > 0
    for (name, own_tensor), (_, tensor) in zip(train.adapter(), plain.adapter(), strict=True):
        torch.testing.assert_close(own_tensor, tensor, rtol=1e-3, atol=1e-4, msg=name)


@with_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generation_and_a_reference_use_the_same_bytes(one_rank: None, tmp_path: Path, dtype: str) -> None:
    train = trained(tmp_path, "qwen2", dtype)
    served = TransformersEngine(train.path, dtype=dtype, adapter=LORA, base=train.lend(), max_rows=2)
    ref = FsdpEngine.of(train.path, frozen=True, dtype=dtype, base=train)
    packed = {p.data_ptr() for name, p in train.model.named_parameters() if name.endswith(".packed")}
    for model in served.model, ref.model:
        assert packed == {p.data_ptr() for name, p in model.named_parameters() if name.endswith(".packed")}
    assert not ref.owned
    tolerance = 1e-4 if dtype == "float32" else 0.1
    first = None
    for version in range(3):
        served.load_weights(train.adapter(), version)
        ((one, *_), _) = served.generate(REQUESTS, Sampling(6))
        tokens = Ragged.of([[*REQUESTS[0].prompt, *one.tokens]])
        mask = Ragged.of([[False] * 4 + [True] * len(one.tokens)], torch.bool)
        scores = train.logprobs(tokens, mask).values[4:]
        torch.testing.assert_close(scores, torch.tensor(one.logprobs), rtol=tolerance, atol=tolerance)
        if version == 0:
            torch.testing.assert_close(ref.logprobs(tokens, mask).values[4:], scores, rtol=0, atol=0)
            first = one.logprobs
        train.update(scored(), objective, torch.arange(3), 3)
    assert one.logprobs != first


@with_library
def test_parts_leave_the_device_and_come_back_and_checkpoints_load(one_rank: None, tmp_path: Path) -> None:
    train = trained(tmp_path, "llama")
    train.update(scored(), objective, torch.arange(3), 3)
    before = train.logprobs(**scored()).values
    train.offload(["parameters", "optimizer"])
    assert not sum(storage.nbytes() for storage in distinct_storages(train.model.parameters()))
    train.reload(["parameters", "optimizer"])
    assert train.logprobs(**scored()).values.equal(before)
    train.save(str(tmp_path / "saved"))
    again = trained(tmp_path, "llama")
    again.load(str(tmp_path / "saved"))
    assert again.logprobs(**scored()).values.equal(before)
    train.export(str(tmp_path / "exported"))
    exported = FsdpEngine.of(str(tmp_path / "exported"), frozen=True)
    torch.testing.assert_close(exported.logprobs(**scored()).values, before, rtol=1e-4, atol=1e-5)
