"""Sharded parameters in full, a bucket of them in one collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

BUCKET = 2**26  # numbers gathered at once: 256 MiB in float32

Named = tuple[str, torch.Tensor]


def gather_full(tensors: Iterable[Named], group: dist.ProcessGroup, bucket: int = BUCKET) -> Iterator[Named]:
    """Each tensor in full, in the order given; sharded ones are gathered over ``group``.

    ``DTensor.full_tensor`` pays one collective and its dispatch for each; here a bucket of at most ``bucket``
    numbers (or one larger tensor) shares one. Collective: every rank must take all of them.
    """
    for part in _buckets(tensors, bucket):
        yield from zip(
            [name for name, _ in part], _gather([tensor for _, tensor in part], group), strict=True
        )


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A shard as it is, as it is gathered into new memory; a copy of what is whole."""
    return tensor if isinstance(tensor, DTensor) else tensor.detach().clone()


def _buckets(tensors: Iterable[Named], bucket: int) -> Iterator[list[Named]]:
    part: list[Named] = []
    size = 0
    for name, tensor in tensors:
        mixed = part and tensor.dtype != part[0][1].dtype
        if part and (mixed or size + tensor.numel() > bucket):
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.numel()
    if part:
        yield part


@torch.no_grad()
def _gather(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """A bucket of tensors of one dtype, in full. Plain tensors are on every rank already."""
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    if not sharded:
        return tensors
    pieces = [_padded_shard(t, group.size()) for t in sharded]
    own = torch.cat(pieces)
    ranks = own.new_empty(group.size(), len(own))
    dist.all_gather(list(ranks.unbind(0)), own, group=group)
    parts = iter(ranks.split([len(piece) for piece in pieces], dim=1))
    return [
        next(parts).reshape(-1, *t.shape[1:])[: t.shape[0]] if isinstance(t, DTensor) else t for t in tensors
    ]


def _padded_shard(tensor: DTensor, ranks: int) -> torch.Tensor:
    """This rank's rows, with zero rows up to the largest shard's: flat."""
    assert all(p.is_shard(0) for p in tensor.placements), f"expected rows sharded, not {tensor.placements}"
    local = tensor.to_local()
    rows = -(-tensor.shape[0] // ranks)
    largest = rows * math.prod(tensor.shape[1:])
    return torch.nn.functional.pad(local.flatten(), (0, largest - local.numel()))
