"""Weights in 8 bits, by blocks: what a sync brings to a server that runs a model in FP8.

SGLang keeps a checkpoint of such weights as it is, with a scale for each block of 128 rows and columns
(DeepSeek-V3, arXiv 2412.19437), so that new ones can take their place. What it quantizes by itself as it
starts can't be brought anew: its kernels' layout has no way back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rlgraph.engines.sglang_options import FP8_BLOCK
from rlgraph.errors import RunError
from rlgraph.runtime.engines.weights.transfer import Named

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
# the ends of names: of a decoder's linear layers, Mixtral's experts among them, and what scales add
LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
SCALES = "_scale_inv"
# what a checkpoint in FP8 says of itself in its config.json
CONFIG = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
}
HOPPER = 9  # the major compute capability: before it SGLang lays weights out anew, after it their scales


def check_device(capability: tuple[int, int]) -> None:
    """Check that a GPU's kernels take such weights as they are brought.

    Raises:
        RunError: they don't.
    """
    if capability[0] != HOPPER:
        law = "serve.sglang.quantization: fp8 is of Hopper GPUs; "
        law += f"this one has compute capability {capability}"
        raise RunError(f"{law}\n  leave out serve.sglang.quantization")


def quantized(named: Iterable[Named]) -> Iterator[Named]:
    """Yield weights, those of the decoder's linear layers in 8 bits and their scales.

    Weights of one layer come in one data type, so that they share a bucket; what is small comes at the end.
    """
    later = list[Named]()
    for name, tensor in named:
        if name.endswith(LINEAR):
            small, scales = in_blocks(tensor)
            yield name, small
            later.append((name + SCALES, scales))
        elif ".layers." in name:
            later.append((name, tensor.detach().clone()))  # the buffer that it lies in is used again
        else:
            yield name, tensor
    yield from sorted(later, key=lambda one: str(one[1].dtype))


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight ``[out, in]`` in 8 bits, and the float32 scale of each block that it is divided by."""
    rows, columns = weight.shape
    tall = -(-rows // FP8_BLOCK)
    wide = -(-columns // FP8_BLOCK)
    padding = (0, wide * FP8_BLOCK - columns, 0, tall * FP8_BLOCK - rows)
    blocks = torch.nn.functional.pad(weight.detach().float(), padding)
    blocks = blocks.view(tall, FP8_BLOCK, wide, FP8_BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    small = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(DTYPE)
    return small.view(tall * FP8_BLOCK, -1)[:rows, :columns].contiguous(), scales


def overridden(options: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's settings for a model that is served in 8 bits."""
    fields = json.loads(str(options.get("json_model_override_args", "{}")))
    return {**options, "json_model_override_args": json.dumps({**fields, **CONFIG})}
