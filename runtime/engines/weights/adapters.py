"""Adapters (LoRA, arXiv 2106.09685) merged into weights: ``W + alpha / rank B A``."""

import torch

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
