"""Several tensors in one flat one, as ``rlgraph.runtime.engines.sglang.weights`` asks SGLang for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """Where a tensor lies in the flat one, in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int


class FlattenedTensorBucket:
    """A flat uint8 tensor and its parts."""

    def __init__(self, flat: torch.Tensor, parts: list[Part]) -> None:
        self.flat, self.parts = flat, parts

    @classmethod
    def empty(
        cls,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[torch.Size],
        device: torch.device,
    ) -> FlattenedTensorBucket:
        """With room for tensors of these names, data types and shapes."""
        parts, at = [], 0
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            end = at + shape.numel() * dtype.itemsize
            parts.append(Part(name, shape, dtype, at, end))
            at = end
        return cls(torch.empty(at, dtype=torch.uint8, device=device), parts)

    def get_flattened_tensor(self) -> torch.Tensor:
        """uint8 ``[bytes]``."""
        return self.flat

    def get_metadata(self) -> list[Part]:
        """The parts, in order."""
        return self.parts
