"""Shards of a model: a rank's part, when modules gather parameters, and when they reduce gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def gathered(shards: Sequence[FSDPModule]) -> Iterator[None]:
    """Share gathered parameters among forward passes; those still gathered are freed after them.

    Else a module would hold its full parameters, which an optimizer step on the shards does not reach.
    """
    try:
        yield
    finally:
        for shard in shards:
            shard.reshard()


def reduce_with_the_last(shards: Sequence[FSDPModule], last: bool) -> None:
    """Reduce gradients once per mini-batch, with its last micro-batch, for a model gathered whole.

    One that is gathered by layer reduces with every micro-batch, so that a rank never holds more full
    gradients than one layer's.
    """
    for shard in shards:
        shard.set_requires_gradient_sync(last, recurse=False)
        shard.set_reshard_after_backward(last, recurse=False)
        shard.set_is_last_backward(last)
