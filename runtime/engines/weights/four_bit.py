"""Linear layers whose frozen weights lie in 4 bits (NF4, QLoRA, arXiv 2305.14314), by bitsandbytes.

A weight is cut into blocks of 64 numbers, each of which has one scale in float32; a number is the nearest of
16 quantiles of a normal distribution. So it takes half a byte, and 4 / 64 of its scale. A layer computes with
its weight as it was before, in the data type of the model, rounded to those numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from rlgraph.costs.limits import FOUR_BIT_BLOCK
from rlgraph.runtime.engines.decoder_layers import decoder_layers
from rlgraph.runtime.engines.weights.naming import WeightView, WeightViews, base_name

KIND = "nf4"
FourBitLayers = Mapping[tuple[WeightView, ...], "FourBitLinear"]  # by the weight of the checkpoint


def unfit() -> str:
    """Return why weights can't be held in 4 bits here, or nothing."""
    if find_spec("bitsandbytes"):
        return ""
    remedy = "pip install 'rlgraph-compiler[quantize]', or leave out models.NAME.train.lora.quantize"
    return f"train.lora.quantize needs bitsandbytes, which is not installed; {remedy}"


class FourBitLinear(torch.nn.Module):
    """A linear layer that computes with a frozen weight in 4 bits.

    Args:
        weight: ``[outputs, inputs]`` on the device, in the data type of the computation.
        bias: ``[outputs]``, if the layer has one.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.nn.Parameter | None) -> None:
        from bitsandbytes.functional import quantize_4bit

        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed, state = quantize_4bit(weight.detach(), blocksize=FOUR_BIT_BLOCK, quant_type=KIND)
        # parameters, so that they leave the device and come back with all others: uint8 [numbers / 2, 1], and
        # float32 [blocks], which shares its memory with the state
        self.packed = torch.nn.Parameter(packed, requires_grad=False)
        self.scales = torch.nn.Parameter(state.absmax, requires_grad=False)
        self.bias = bias
        self.state: Any = state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[..., outputs]`` of ``inputs [..., inputs]``; gradients are those of the inputs alone."""
        from bitsandbytes import matmul_4bit

        out: torch.Tensor = matmul_4bit(inputs, self.packed.t(), quant_state=self.state, bias=self.bias)
        return out

    def whole(self) -> torch.Tensor:
        """Return the weight that it computes with ``[outputs, inputs]``, as a tensor of its own."""
        from bitsandbytes.functional import dequantize_4bit

        weight: torch.Tensor = dequantize_4bit(self.packed, self.state)
        return weight


def quantize(model: torch.nn.Module, weight_of: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Hold the weights of the linear layers of a decoder in 4 bits, one after the other, in place.

    Embeddings, norms and the head stay as they are, as do adapters, which the layers may have already.

    Args:
        weight_of: returns a parameter on the device, by its name and the parameter as the model has it now.
    """

    def quantized(name: str, layer: torch.nn.Linear) -> FourBitLinear:
        bias = None
        if layer.bias is not None:
            bias = torch.nn.Parameter(weight_of(f"{name}.bias", layer.bias), requires_grad=False)
        return FourBitLinear(weight_of(f"{name}.weight", layer.weight), bias)

    _replace(model, quantized)


def four_bit_layers(model: torch.nn.Module, views: WeightViews) -> FourBitLayers:
    """Return the layers of a model whose weights lie in 4 bits."""
    layers: dict[tuple[WeightView, ...], FourBitLinear] = {}
    for name, module in model.named_modules():
        if isinstance(module, FourBitLinear):
            layers[tuple(views[f"{base_name(name)}.weight"])] = module
    return layers


def put_layers(model: torch.nn.Module, views: WeightViews, layers: FourBitLayers) -> None:
    """Have a model compute with the layers of another one on the same weights, in place."""
    if layers:
        _replace(model, lambda name, _: layers[tuple(views[f"{base_name(name)}.weight"])])


def whole_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a model; a weight in 4 bits in full, by the name of a linear layer's."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FourBitLinear)}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner not in layers or leaf == "bias":
            yield name, parameter
        elif leaf == "packed":
            yield f"{owner}.weight", torch.nn.Parameter(layers[owner].whole(), requires_grad=False)


def _replace(model: torch.nn.Module, made: Callable[[str, torch.nn.Linear], FourBitLinear]) -> None:
    """Replace the linear layers of a decoder that are no adapters, in place."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    for name, module in list(model.named_modules()):
        is_factor = ".lora_A." in name or ".lora_B." in name
        if isinstance(module, torch.nn.Linear) and id(module) in inside and not is_factor:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, made(name, module))
