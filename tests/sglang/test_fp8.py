"""Weights in 8 bits: what a sync sends is close to the weights, and is what SGLang takes for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlgraph.errors import RunError
from rlgraph.runtime.engines.sglang import engine as module
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.sglang.fp8 import CONFIG, DTYPE, check_device, in_blocks, overridden, quantized
from rlgraph.runtime.engines.sglang.launch import Launch
from rlgraph.runtime.engines.weights.transfer import in_buckets

pytestmark = pytest.mark.filterwarnings("default")


def back(small: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight that a server computes with: each block times its scale."""
    each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return small.float() * each[: small.shape[0], : small.shape[1]]


@pytest.mark.parametrize("shape", [(128, 128), (384, 256), (200, 130), (1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_in_blocks_is_near(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).mul(torch.logspace(-4, 3, shape[1])).to(dtype)  # columns of unlike sizes
    small, scales = in_blocks(weight)
    assert small.dtype == DTYPE and small.shape == shape
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128)) and scales.dtype == torch.float32
    apart = (back(small, scales) - weight.float()).abs()
    # three bits behind the point: half of the last one, and below the smallest normal number half of its step
    each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert (apart <= torch.maximum(weight.float().abs() / 16, each * 2.0**-10) * 1.0001).all()
    largest, place = weight.float().abs().flatten().max(0)
    assert torch.isclose(back(small, scales).flatten()[place].abs(), largest, rtol=1e-5)  # it is a block's


def test_a_weight_of_zeros_stays_so() -> None:
    small, scales = in_blocks(torch.zeros(130, 5))
    assert scales.isfinite().all() and (scales > 0).all() and not back(small, scales).any()


def test_what_is_no_linear_layer_is_sent_as_it_is_and_few_buckets_carry_all() -> None:
    buffer = torch.ones(256)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", torch.ones(64, 256, dtype=torch.bfloat16)
        for layer in range(3):
            at = f"model.layers.{layer}"
            for name in ("self_attn.q_proj", "mlp.experts.0.down_proj", "block_sparse_moe.experts.1.w2"):
                yield f"{at}.{name}.weight", torch.full((256, 256), 1.0 + layer, dtype=torch.bfloat16)
            buffer.fill_(layer)  # as the gather, which uses it again
            yield f"{at}.input_layernorm.weight", buffer
            yield f"{at}.mlp.gate.weight", torch.ones(8, 256, dtype=torch.bfloat16)
            yield f"{at}.self_attn.q_proj.bias", torch.ones(256, dtype=torch.bfloat16)
        yield "lm_head.weight", torch.ones(64, 256, dtype=torch.bfloat16)

    sent = dict(quantized(weights()))
    linear = [name for name, tensor in sent.items() if tensor.dtype == DTYPE]
    assert len(linear) == 9 and all(name.endswith(("_proj.weight", ".w2.weight")) for name in linear)
    assert {f"{name}_scale_inv" for name in linear} <= {*sent}
    assert len(sent) == 2 + 3 * 3 + 9 * 2
    norms = [float(sent[f"model.layers.{layer}.input_layernorm.weight"][0]) for layer in range(3)]
    assert norms == [0.0, 1.0, 2.0]
    assert len([*in_buckets(quantized(weights()))]) <= 5


@pytest.mark.slow
def test_sglang_has_these_parameters_for_such_a_checkpoint() -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    config = Fp8Config.from_config(CONFIG["quantization_config"])
    assert config.is_checkpoint_fp8_serialized and config.weight_block_size == [128, 128]
    layer = torch.nn.Module()
    Fp8LinearMethod.create_fp8_weight_(
        layer,
        block_quant=True,
        quant_config=config,
        use_mxfp8=False,
        output_size_per_partition=384,
        input_size_per_partition=256,
        output_partition_sizes=[256, 128],
        weight_loader=lambda *_: None,
        skip_block_quant_check=True,
        input_size=256,
        output_size=384,
        is_checkpoint_fp8_serialized=True,
        params_dtype=torch.bfloat16,
    )
    theirs = {f"a_proj.{n}": (p.shape, p.dtype) for n, p in layer.named_parameters()}
    ours = quantized([("a_proj.weight", torch.ones(384, 256))])
    assert theirs == {name: (tensor.shape, tensor.dtype) for name, tensor in ours}


def test_sglang_multiplies_with_the_weight_that_comes_back() -> None:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    torch.manual_seed(0)
    small, scales = in_blocks(torch.randn(256, 384))
    assert torch.equal(block_quant_dequant(small, scales, [128, 128], torch.float32), back(small, scales))


def test_a_bucket_of_8_bits_goes_through_shared_memory() -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    from rlgraph.runtime.engines.sglang.weights import Flat

    torch.manual_seed(0)
    (named, *_) = in_buckets(quantized([(f"layers.{n}.a_proj.weight", torch.randn(128, 256)) for n in "ab"]))
    held = MultiprocessingSerializer.deserialize(Flat(named).handle())
    bucket = FlattenedTensorBucket(flattened_tensor=held["flattened_tensor"], metadata=held["metadata"])
    came = dict(bucket.reconstruct_tensors())
    assert [*came] == [name for name, _ in named]
    assert all(torch.equal(came[name].float(), tensor.float()) for name, tensor in named)


def test_a_server_starts_with_the_configuration_of_such_a_checkpoint() -> None:
    options = overridden(
        {"json_model_override_args": '{"max_position_embeddings": 64}', "trust_remote_code": True}
    )
    launch = Launch("a/model", "cuda", "bfloat16", 1, 64, 4, options)
    told = json.loads(str(launch.settings()["json_model_override_args"]))
    assert told == {"max_position_embeddings": 64, **CONFIG} and launch.settings()["load_format"] == "dummy"


def test_an_engine_brings_its_server_weights_in_8_bits(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, sent = list[Launch](), dict[str, torch.Tensor]()

    class Supervisor:
        client, notes, failed = Client("http://127.0.0.1:1"), (), None

        def __init__(self, launch: Launch, *_: object) -> None:
            launched.append(launch)

        def load(self, parameters: Iterator[tuple[str, torch.Tensor]], version: int) -> bool:
            sent.update(parameters)
            return True

        def close(self) -> None: ...

    monkeypatch.setattr(module, "SglangSupervisor", Supervisor)
    engine = module.SglangEngine(path, dtype="bfloat16", logs=tmp_path, quantization="fp8")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine.load_weights(model.named_parameters(), 1)
    engine.close()
    linear = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    small = {name for name, tensor in sent.items() if tensor.dtype == DTYPE}
    assert small == linear - {"lm_head.weight"} and engine.version == 1
    assert {tensor.dtype for name, tensor in sent.items() if "layernorm" in name} == {torch.bfloat16}
    assert json.loads(str(launched[0].options["json_model_override_args"])) == CONFIG


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_gpus_are_refused(capability: tuple[int, int]) -> None:
    check_device((9, 0))
    with pytest.raises(RunError, match=r"of Hopper GPUs(.|\n)*leave out serve.sglang.quantization"):
        check_device(capability)
