"""When the modules of a sharded model gather their parameters, and when they reduce gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.fsdp import FSDPModule


@contextmanager
def gathered(shards: Sequence[FSDPModule]) -> Iterator[None]:
    """Forward passes that may share gathered parameters; what is still gathered is freed after them.

    Else a module would hold its full parameters, which an optimizer step on the shards does not reach.
    """
    try:
        yield
    finally:
        for shard in shards:
            shard.reshard()


def reduce_with_the_last(shards: Sequence[FSDPModule], last: bool) -> None:
    """Reduce gradients once a mini-batch, with its last micro-batch: for a model that is gathered whole.

    One that is gathered by layer reduces with every micro-batch, so that a rank never holds more full
    gradients than one layer's.
    """
    for shard in shards:
        shard.set_requires_gradient_sync(last, recurse=False)
        shard.set_reshard_after_backward(last, recurse=False)
        shard.set_is_last_backward(last)
