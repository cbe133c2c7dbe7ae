"""Shards of a model: those of a rank, memory that models share, full parameters, and when modules gather."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlgraph.costs.limits import buckets
from rlgraph.runtime.engines.fsdp.tensor import WHOLE, LayerParts
from rlgraph.runtime.engines.weights.frozen import FrozenWeights, frozen_weights
from rlgraph.runtime.engines.weights.naming import WeightViews
from rlgraph.runtime.engines.weights.transfer import Named


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_shards(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's part of the gradient of each parameter that has one."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def borrow(model: torch.nn.Module, views: WeightViews, lender_weights: FrozenWeights) -> None:
    """Put a model's frozen parameters into the memory of those that another model holds on this rank.

    Both read the same weights on the same ranks; either may be sharded, or alone and plain.
    """
    replacements: dict[int, torch.nn.Parameter] = {}  # by the identity of the parameter that it replaces
    shards: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    frozen = frozen_weights(model, views)
    for key in frozen.keys() & lender_weights.keys():
        parameter = frozen[key]
        rows = local(lender_weights[key])
        has_same_rows = (rows.dtype, rows.shape) == (parameter.dtype, local(parameter).shape)
        assert has_same_rows, "of another mesh or data type"
        if isinstance(parameter, DTensor):
            sharded = DTensor.from_local(
                _with_padding(lender_weights[key]),
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            replacement = torch.nn.Parameter(sharded, requires_grad=False)
            shards.append((replacement, rows))
        else:
            replacement = torch.nn.Parameter(rows, requires_grad=False)
        replacements[id(parameter)] = replacement
    borrowed = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in replacements:
            borrowed[name] = replacements[id(tensor)]
    model.load_state_dict(borrowed, strict=False, assign=True)
    for replacement, rows in shards:  # FSDP2 gathers the padding of rows too, but a shard ends before it
        replacement._local_tensor = rows  # type: ignore[attr-defined]  # torch types no DTensor as a parameter


def _with_padding(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter's rows on this rank, with the rows by which FSDP2 pads them, at the end."""
    rows = local(tensor)
    if not isinstance(tensor, DTensor):
        return rows
    width = max(1, rows.shape[1:].numel())
    count = rows.untyped_storage().nbytes() // rows.itemsize // width
    return rows.as_strided((count, *rows.shape[1:]), rows.stride())


def gather_full(
    tensors: Iterable[Named],
    group: dist.ProcessGroup,
    narrow: Mapping[str, torch.dtype] | None = None,
    layer_parts: LayerParts = WHOLE,
) -> Iterator[Named]:
    """Yield each tensor in full, in the order given. A collective.

    ``DTensor.full_tensor`` pays one collective and its dispatch for each; here the tensors of a bucket share
    one.

    Args:
        tensors: of this rank, by name; a sharded one is gathered.
        group: the ranks that together have one copy.
        narrow: data types to which tensors are cast before they are gathered.
        layer_parts: which tensors are divided over ranks. Each is gathered over the ranks that have the same
            part, and the parts are then joined.
    """
    narrow = narrow or {}

    def typed() -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
        for name, tensor in tensors:
            yield name, tensor, narrow.get(name, tensor.dtype)

    def full_bytes(entry: tuple[str, torch.Tensor, torch.dtype]) -> int:
        name, tensor, dtype = entry
        return tensor.numel() * layer_parts.times(name) * dtype.itemsize

    for entries in buckets(typed(), full_bytes, lambda entry: entry[2]):
        names, bucket, (dtype, *_) = zip(*entries, strict=True)
        holders = [layer_parts.holders(name, group) for name in names]
        # not bound to a name, which would keep a bucket in memory until the next one is gathered
        yield from zip(names, layer_parts.joined(names, _of_holders(bucket, holders, dtype)), strict=True)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a shard as it is, since it is gathered into new memory, and a copy of what is whole."""
    return tensor if isinstance(tensor, DTensor) else tensor.detach().clone()


def _of_holders(
    tensors: Sequence[torch.Tensor], holders: Sequence[dist.ProcessGroup], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return a bucket of tensors in full, gathered from the ranks that hold each."""
    if all(group is holders[0] for group in holders):
        return _gather(tensors, holders[0], dtype)
    gathered: dict[dist.ProcessGroup, Iterator[torch.Tensor]] = {}
    for group in dict.fromkeys(holders):
        of_group = [tensor for tensor, holder in zip(tensors, holders, strict=True) if holder is group]
        gathered[group] = iter(_gather(of_group, group, dtype))
    return [next(gathered[group]) for group in holders]


@torch.no_grad()
def _gather(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return a bucket of tensors in full, in one dtype. Plain tensors are on every rank already."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not sharded:
        return [tensor.to(dtype) for tensor in tensors]
    sizes = [_largest_shard(tensor, group.size()) for tensor in sharded]
    own_shards = local(sharded[0]).new_empty(sum(sizes), dtype=dtype)
    for room, tensor in zip(own_shards.split(sizes), sharded, strict=True):
        shard = local(tensor).flatten()
        room[: len(shard)].copy_(shard)  # cast on the way; what is left stands for no rows
    ranks = own_shards.new_empty(group.size(), len(own_shards))
    dist.all_gather(list(ranks.unbind(0)), own_shards, group=group)
    gathered_columns = iter(ranks.split(sizes, dim=1))
    full = []
    for each in tensors:
        if isinstance(each, DTensor):
            rows = next(gathered_columns).contiguous().view(-1, *each.shape[1:])
            full.append(rows[: each.shape[0]])  # the last shards may be shorter
        else:
            full.append(each.to(dtype))
    return full


def _largest_shard(tensor: DTensor, ranks: int) -> int:
    """Return how many numbers the largest rank's rows have: every rank makes room for them."""
    assert tensor.placements[-1].is_shard(0), f"expected rows sharded, not {tensor.placements}"
    return -(-tensor.shape[0] // ranks) * tensor.shape[1:].numel()


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


def reduce_with_the_last(shards: Sequence[FSDPModule], is_last: bool, whole: bool) -> None:
    """Reduce gradients once per mini-batch, with its last micro-batch, for a model gathered ``whole``.

    One that is gathered by layer reduces them into shards with every micro-batch, so that a rank never holds
    more full gradients than one layer's. Only the sum of shards over replicas waits for the last.
    """
    for shard in shards:
        shard.set_requires_all_reduce(is_last, recurse=False)
        if not whole:
            continue
        shard.set_requires_gradient_sync(is_last, recurse=False)
        shard.set_reshard_after_backward(is_last, recurse=False)
        shard.set_is_last_backward(is_last)


def hold_in(model: torch.nn.Module, shards: Sequence[FSDPModule], dtype: torch.dtype) -> None:
    """Hold the weights of a sharded model in ``dtype``, which it computes in, and gradients in float32.

    FSDP2 would cast gradients to the type that weights are held in, and add up those of micro-batches in it.
    """
    for parameter in dict.fromkeys(model.parameters()):
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach().to(dtype)))
        parameter.grad_dtype = torch.float32
    states = [shard._get_fsdp_state() for shard in reversed(shards)]  # the root first, which prepares all
    for state in states:
        state._lazy_init()
        several = getattr(state, "_fsdp_param_groups", None)  # with torch 2.12, which has more than one
        for group in filter(None, [state._fsdp_param_group] if several is None else several):
            group._orig_dtype = torch.float32
