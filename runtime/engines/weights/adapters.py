"""Adapters (LoRA, arXiv 2106.09685) merged into weights: ``W + alpha / rank B A``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rlgraph.runtime.engines.weights.naming import base_name
from rlgraph.runtime.engines.weights.transfer import Named

FILES = "base_model.model."  # with this begin names in peft's files


@torch.no_grad()
def add(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float, transposed: bool) -> None:
    """Add ``scale B A`` to a weight, in place: the sum is one of float32, of experts each by itself.

    Args:
        weight: ``[outputs, inputs]``, or of experts ``[experts, outputs, inputs]``; where they are
            ``transposed``, ``[experts, inputs, outputs]``.
        down, up: A and B.
    """
    count = len(weight) if weight.dim() == 3 else 1
    pairs = zip(up.unflatten(1, (-1, count)).unbind(2), down.unflatten(0, (count, -1)), strict=True)
    for matrix, (b, a) in zip(weight if weight.dim() == 3 else [weight], pairs, strict=True):
        product = scale * (b.float() @ a.float())
        matrix.copy_(matrix.float() + (product.T if transposed else product))


class MergedAdapter:
    """The adapter in the weights of a model, each version of which takes the place of the one before.

    The weights that it changes are kept a second time without it: to subtract a version would leave what was
    rounded. ``options`` are ``models.NAME.train.lora``.
    """

    def __init__(self, model: torch.nn.Module, options: Mapping[str, Any]) -> None:
        self.model = model
        self.scale = options["alpha"] / options["rank"]
        names = ("gate_up_proj", "down_proj")
        self.experts = [name for name in names if f"experts.{name}" in options["targets"]]
        self.base: dict[str, torch.Tensor] = {}  # by the name of the weight

    def load(self, named: Iterable[Named]) -> None:
        """Take a version, by its names in peft's files; A and B come in any order.

        Raises:
            AttributeError: a layer that the model lacks.
            ValueError: A or B is missing of a layer, or both where the version before had them.
        """
        waiting: dict[str, torch.Tensor] = {}
        merged = set[str]()
        for name, tensor in named:
            layer = name.removeprefix(FILES).partition(".lora_")[0]
            waiting[name] = tensor.clone()  # good until the next is asked for
            down, up = (f"{FILES}{layer}.lora_{factor}.weight" for factor in "AB")
            if down in waiting and up in waiting:
                merged.add(self._merge(layer, waiting.pop(down), waiting.pop(up)))
        if lacking := [*waiting, *sorted(self.base.keys() - merged)]:
            raise ValueError(f"an adapter came of which A or B is missing: {', '.join(lacking[:3])}")

    @torch.no_grad()
    def _merge(self, layer: str, down: torch.Tensor, up: torch.Tensor) -> str:
        """Merge one layer's pair; return the name of its weight."""
        module = self.model.get_submodule(base_name(layer))
        # peft wraps experts once for each weight that it adapts, the last one outside
        leaf = "weight"
        if not hasattr(module, "weight"):
            leaf = self.experts[~layer.count(".base_layer")]
        name = f"{base_name(layer)}.{leaf}"
        weight = getattr(module, leaf)
        if name in self.base:
            weight.copy_(self.base[name])
        else:
            self.base[name] = weight.clone()
        device = weight.device
        transposed = getattr(module, "is_transposed", False)
        add(weight, down.to(device), up.to(device), self.scale, transposed)
        return name
