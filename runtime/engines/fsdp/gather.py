"""Sharded parameters in full, a bucket of them in one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlgraph.costs.limits import buckets
from rlgraph.runtime.engines.weights.transfer import Named

Travels = Callable[[str, torch.Tensor], torch.dtype]


def gather_full(
    tensors: Iterable[Named],
    group: dist.ProcessGroup,
    travels: Travels = lambda name, tensor: tensor.dtype,
) -> Iterator[Named]:
    """Each tensor in full, in the order given; sharded ones are gathered over ``group``.

    ``DTensor.full_tensor`` pays one collective and its dispatch for each; here the tensors of a bucket share
    one. Collective: every rank must take all of them.

    Args:
        tensors: by name.
        group: the ranks that hold the shards.
        travels: the data type that a tensor is cast to before it is gathered.
    """
    typed = ((name, tensor, travels(name, tensor)) for name, tensor in tensors)
    for part in buckets(typed, lambda one: one[1].numel() * one[2].itemsize, lambda one: one[2]):
        names, own, (dtype, *_) = zip(*part, strict=True)
        yield from zip(names, _gather(own, group, dtype), strict=True)  # a name for them would keep them


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A shard as it is, as it is gathered into new memory; a copy of what is whole."""
    return tensor if isinstance(tensor, DTensor) else tensor.detach().clone()


@torch.no_grad()
def _gather(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, dtype: torch.dtype
) -> list[torch.Tensor]:
    """A bucket of tensors in full, in one dtype. Plain tensors are on every rank already."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not sharded:
        return [tensor.to(dtype) for tensor in tensors]
    sizes = [_largest_shard(tensor, group.size()) for tensor in sharded]
    own = sharded[0].to_local().new_empty(sum(sizes), dtype=dtype)
    for room, tensor in zip(own.split(sizes), sharded, strict=True):
        shard = tensor.to_local().flatten()
        room[: len(shard)].copy_(shard)  # cast on the way; what is left stands for no rows
    ranks = own.new_empty(group.size(), len(own))
    dist.all_gather(list(ranks.unbind(0)), own, group=group)
    parts = iter(ranks.split(sizes, dim=1))
    return [
        next(parts).reshape(-1, *t.shape[1:])[: t.shape[0]] if isinstance(t, DTensor) else t.to(dtype)
        for t in tensors
    ]


def _largest_shard(tensor: DTensor, ranks: int) -> int:
    """Numbers of the largest rank's rows, which every rank makes room for."""
    assert all(p.is_shard(0) for p in tensor.placements), f"expected rows sharded, not {tensor.placements}"
    return -(-tensor.shape[0] // ranks) * tensor.shape[1:].numel()
