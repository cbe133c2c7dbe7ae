"""The place of a rank's shard in the whole tensor, as FSDP2 shards by rows and layers are divided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

Cut = tuple[int, int, int]  # a dimension, and which of how many equal parts of it


def shard_of(tensor: DTensor) -> tuple[int, int]:
    """Return the number of this rank's shard, and of how many: of one copy, where there are several."""
    mesh = tensor.device_mesh
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def rows_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the rows of a rank, from and to, as FSDP2 shards.

    Example:
        >>> [rows_of(5, rank, 4) for rank in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    most = -(-rows // ranks)
    return min(rows, rank * most), min(rows, (rank + 1) * most)


def extent(tensor: torch.Tensor, cut: Cut | None = None) -> tuple[slice, ...]:
    """Return where this rank's shard of a tensor lies in the whole one, of which the tensor may be a part."""
    shard = shard_of(tensor) if isinstance(tensor, DTensor) else (0, 1)
    shape = list(tensor.shape)
    if cut:
        shape[cut[0]] *= cut[2]
    return extent_of(shape, cut, shard)


def extent_of(shape: Sequence[int], cut: Cut | None, shard: tuple[int, int]) -> tuple[slice, ...]:
    """Return where a shard, which of how many, lies in a tensor of this shape, or shards of a part of one.

    Example:
        >>> extent_of([5, 2], None, (2, 4))
        (slice(4, 5, None), slice(0, 2, None))
        >>> extent_of([8, 6], (1, 1, 2), (0, 2))
        (slice(0, 4, None), slice(3, 6, None))
    """
    spans = [(0, size) for size in shape]
    if cut:
        dimension, part, parts = cut
        size = shape[dimension] // parts
        spans[dimension] = part * size, (part + 1) * size
    if spans:
        first, last = spans[0]
        start, stop = rows_of(last - first, *shard)
        spans[0] = first + start, first + stop
    return tuple(slice(*span) for span in spans)
