"""Sequence parallelism: consecutive ranks share the tokens of each row (DeepSpeed-Ulysses, arXiv 2309.14509).

A rank runs every layer on its part of the width. Only attention looks across tokens: there an all-to-all
trades all heads of the rank's tokens for all tokens of some heads, and another one goes back::

    [rows, heads, share, size]   ->   [rows, heads / ranks, width, size]   ->   attention   ->   and back

The rows of a pool lie on ranks as if nothing were shared. For the length of a call the ranks of a group pool
theirs; each runs the same micro-batches, on its tokens, and keeps the results of its own rows. All of them
see the loss of all tokens, and propagate it through the scores of their own alone: so gradients, which are
summed over all ranks, count every token once.

Shapes: ``width`` tokens of a row, of which a rank has the ``share`` that is ``width / ranks``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rlgraph.costs.limits import key_repeats
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.runtime.engines import attention
from rlgraph.runtime.engines.model_files import runs_own_code
from rlgraph.runtime.engines.weights.transfer import FOREVER

Columns = Mapping[str, Any]
BY_CELL = {"input_ids", "position_ids", "routing"}  # inputs [lanes, width, ...] of which a rank has its share
BY_LENGTH = {"dynamic", "longrope"}  # kinds of position embeddings that look at the largest position given
BY_TOKEN = {"full_attention", "sliding_attention"}  # kinds of layers that look across tokens by attention


@dataclass(frozen=True)
class OwnPart:
    """What a rank computes of a micro-batch, and what the others do."""

    inputs: dict[str, Any]  # the model's arguments: this rank's columns of tokens and positions
    cells: torch.Tensor  # int64 [own]: after which of its cells it scores a token
    own: Any  # which of the scored tokens those are
    order: Any  # all scored tokens: those of the first rank, then of the second, ...
    sizes: tuple[int, ...]  # how many each rank has


@dataclass(frozen=True)
class RowGroup:
    """Consecutive ranks that have the same rows for the length of a call; by default one rank."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    ranks: int = 1

    def pooled(self, columns: Columns) -> tuple[dict[str, Any], slice]:
        """Return the rows of all ranks, in host memory, and where this rank's tokens lie. Collective."""
        if self.group is None:
            return dict(columns), slice(None)
        near = {name: c.to("cpu") if hasattr(c, "to") else c for name, c in columns.items()}
        parts: list[Any] = [None] * self.ranks
        dist.all_gather_object(parts, near, group=self.group)
        ends = [0, *accumulate(len(part["tokens"].values) for part in parts)]
        together = {name: _joined([part[name] for part in parts]) for name in columns}
        return together, slice(ends[self.rank], ends[self.rank + 1])


@dataclass(frozen=True)
class SequenceGroup(RowGroup):
    """The ranks that share the tokens of a row; by default one rank, which has all of them."""

    def share(self, inputs: dict[str, Any], cells: torch.Tensor) -> OwnPart:
        """Return this rank's part of inputs ``[lanes, width]`` that score tokens after ``cells [scored]``.

        What attends is told of the whole width on every rank.
        """
        if self.group is None:
            return OwnPart(inputs, cells, slice(None), slice(None), ())
        width = inputs["input_ids"].shape[1]
        share = width // self.ranks
        owner = cells % width // share
        order = owner.argsort(stable=True)
        sizes = owner.bincount(minlength=self.ranks).tolist()
        own = order.split(sizes)[self.rank]
        mine = slice(self.rank * share, (self.rank + 1) * share)
        positions = inputs.get("position_ids", torch.arange(width)[None])
        inputs = {**inputs, "position_ids": positions}
        inputs |= {name: inputs[name][:, mine] for name in BY_CELL & inputs.keys()}
        return OwnPart(inputs, cells[own] // width * share + cells[own] % share, own, order, tuple(sizes))

    def whole(self, scores: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return the scores ``[scored]`` of all ranks from those ``[own]`` of this one. Collective."""
        return scores if self.group is None else cast(torch.Tensor, _Gather.apply(scores, self, sizes))


ALONE = SequenceGroup()


def sequence_group(pool: dist.ProcessGroup, ranks: int) -> SequenceGroup:
    """Return the ranks that share tokens with this one; see ``row_group``."""
    own = row_group(pool, ranks, "sequence_parallel")
    return SequenceGroup(own.group, own.rank, own.ranks)


def row_group(pool: dist.ProcessGroup, ranks: int, setting: str) -> RowGroup:
    """Return the group of this rank: so many consecutive ones of a pool. A collective within each group.

    Raises:
        ValueError: the pool does not consist of such groups, as a ``setting`` asks for.
    """
    if ranks == 1:
        return RowGroup()
    if pool.size() % ranks:
        raise ValueError(f"{pool.size()} ranks can't be shared out in groups of {ranks} ({setting})")
    first = pool.rank() // ranks * ranks
    members = dist.get_process_group_ranks(pool)[first : first + ranks]
    group = dist.new_group(members, timeout=FOREVER, use_local_synchronization=True)
    return RowGroup(group, pool.rank() - first, ranks)


def check(model: Any, ranks: int) -> None:
    """Check, before weights are read, that a model looks across tokens only in attention that can be wrapped.

    Raises:
        ValueError: it does not, or its query heads can't be shared out.
    """
    if ranks == 1:
        return
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", ranks)
    kinds = {*(getattr(config, "layer_types", None) or ())} - BY_TOKEN
    faults = {
        "it runs Python code that came with it": runs_own_code(model),
        "its layers carry a state from token to token": getattr(model, "_is_stateful", False),
        f"it has layers of {', '.join(sorted(kinds))}": kinds,
        "it takes no positions": "position_ids" not in inspect.signature(type(model).forward).parameters,
        "its attention does not go through transformers' AttentionInterface": (
            not model._supports_attention_backend or config._attn_implementation != "sdpa"
        ),
        "its position embeddings depend on how long a row is": any(
            {*_kinds(getattr(module, "rope_type", ""))} & BY_LENGTH for module in model.modules()
        ),
        f"its {heads} query heads can't be shared out": heads % ranks,
    }
    if fault := next((words for words, holds in faults.items() if holds), ""):
        law = f"{config.model_type}: {fault}, so its sequences can't be shared by {ranks} ranks"
        raise ValueError(f"{law}; set train.sequence_parallel to 1")


def _kinds(rope: Any) -> Iterable[str]:
    """Return the kinds of position embeddings that a module has: one, or one for each kind of layer."""
    return rope.values() if isinstance(rope, Mapping) else [rope]


def share_attention(model: Any, group: SequenceGroup) -> None:
    """Have a transformers model attend over the tokens of all ranks of a group."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if group.group is None:
        return
    kind = model.config._attn_implementation
    config = model.config.get_text_config()
    shared = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    repeats = key_repeats(shared, group.ranks)
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups //= repeats
    name = f"{kind}{attention.OVER}{group.group.group_name}"
    attend = partial(_attend, ALL_ATTENTION_FUNCTIONS[kind], group.group, group.ranks, repeats)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, partial(_mask, ALL_MASK_ATTENTION_FUNCTIONS[kind], group.ranks))
    model.set_attn_implementation(name)


def _mask(mask: Callable[..., Any], ranks: int, *, q_length: int, kv_length: int, **options: Any) -> Any:
    """Return the mask of the whole width, where attention needs one; transformers knows of a share of it."""
    return mask(q_length=q_length * ranks, kv_length=kv_length * ranks, **options)


def _attend(
    attend: Callable[..., Any],
    group: dist.ProcessGroup,
    ranks: int,
    repeats: int,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to all tokens with some heads: ``[rows, heads, share, size]`` -> ``[rows, share, heads, size]``.

    Key and value heads are repeated where they are too few for each rank to have one.
    """
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    query, key, value = (_all_tokens(tensor, group, ranks) for tensor in (query, key, value))
    out, _ = attend(module, query, key, value, attention_mask, **options)
    return _all_heads(out, group, ranks), None


def _all_tokens(tensor: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """Trade heads for tokens: ``[rows, heads, share, size]`` -> ``[rows, heads / ranks, width, size]``."""
    apart = tensor.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4)  # ranks, share, rows, heads, size
    together: torch.Tensor = _Exchange.apply(apart.contiguous(), group)
    return together.flatten(0, 1).permute(1, 2, 0, 3)


def _all_heads(tensor: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """Trade tokens for heads: ``[rows, width, heads / ranks, size]`` -> ``[rows, share, heads, size]``."""
    apart = tensor.unflatten(1, (ranks, -1)).permute(1, 2, 0, 3, 4)  # ranks, share, rows, heads, size
    together: torch.Tensor = _Exchange.apply(apart.contiguous(), group)
    return together.permute(2, 1, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """Sends part i of ``[ranks, ...]`` to rank i, and has its part from there: its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        out = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, gradient.contiguous(), group=ctx.group)
        return out, None


class _Gather(torch.autograd.Function):
    """Gathers scores of all ranks; each propagates the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: SequenceGroup, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.own = group.rank, sizes
        room = own.new_zeros(max(1, *sizes))
        room[: len(own)] = own
        parts = [torch.empty_like(room) for _ in sizes]
        dist.all_gather(parts, room, group=group.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rank, sizes = ctx.own
        return gradient.split(sizes)[rank], None, None


def _joined(parts: list[Any]) -> Any:
    """Return the rows of all parts as one column; a part without rows need not say of what type they are."""
    parts = [part for part in parts if len(part)] or parts[:1]
    if isinstance(parts[0], Ragged):
        lengths = torch.cat([part.lengths for part in parts])
        return Ragged(torch.cat([part.values for part in parts]), offsets_of(lengths))
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    return [row for part in parts for row in part]
