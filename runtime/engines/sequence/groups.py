"""Sequence parallelism: consecutive ranks share the tokens of each row (DeepSpeed-Ulysses, arXiv 2309.14509).

Of every layer a rank runs its part of the width; ``attention.py`` says how it looks across tokens.

The rows of a pool lie on ranks as if nothing were shared. For the length of a call the ranks of a group pool
theirs; each runs the same micro-batches, on its tokens, and keeps the results of its own rows. All of them
see the loss of all tokens, and propagate it through the scores of their own alone: so gradients, which are
summed over all ranks, count every token once.

Shapes: ``width`` tokens of a row, of which a rank has the ``share`` that is ``width / ranks``; ``lanes`` are
rows, or in a ring the chunks of rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rlgraph.costs.limits import ring_ranks
from rlgraph.nodes.support.ragged import joined
from rlgraph.runtime.engines.weights.transfer import FOREVER

Columns = Mapping[str, Any]
# inputs [lanes, width, ...] of which a rank has its share
BY_CELL = {"input_ids", "position_ids", "routing", "counted"}


@dataclass(frozen=True)
class OwnPart:
    """The part of a micro-batch that a rank computes, and those of the others."""

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
        rank_columns: list[Any] = [None] * self.ranks
        dist.all_gather_object(rank_columns, near, group=self.group)
        ends = [0, *accumulate(len(columns_of_rank["tokens"].values) for columns_of_rank in rank_columns)]
        together = {
            name: joined([columns_of_rank[name] for columns_of_rank in rank_columns]) for name in columns
        }
        return together, slice(ends[self.rank], ends[self.rank + 1])


@dataclass(frozen=True)
class SequenceGroup(RowGroup):
    """The ranks that share the tokens of a row; by default one rank, which has all of them."""

    ring: int = 1  # ranks that share the tokens of the same heads

    @property
    def heads(self) -> int:
        """Return how many consecutive ranks share out heads."""
        return self.ranks // self.ring

    @property
    def chunks(self) -> tuple[int, ...]:
        """Return the numbers of the chunks of a row that this rank's ring has here."""
        ring_rank = self.rank // self.heads
        return (ring_rank, self._last - ring_rank) if self.ring > 1 else (0,)

    @property
    def multiple(self) -> int:
        """Return what the width of a row is a multiple of."""
        return self.heads * (self._last + 1)

    @property
    def _last(self) -> int:
        return 2 * self.ring - 1 if self.ring > 1 else 0

    def chunked(self, cells: torch.Tensor) -> torch.Tensor:
        """Return what of cells ``[rows, width, ...]`` is in this rank's chunks: ``[lanes, chunk, ...]``."""
        chunks = cells.unflatten(1, (self._last + 1, -1))
        return torch.cat([chunks[:, number] for number in self.chunks])

    def share(self, inputs: dict[str, Any], cells: torch.Tensor) -> OwnPart:
        """Return this rank's part of inputs ``[rows, width]`` that score tokens after ``cells [scored]``.

        What attends is told of the whole width on every rank.
        """
        if self.group is None:
            return OwnPart(inputs, cells, slice(None), slice(None), ())
        rows, width = inputs["input_ids"].shape
        chunk = width // (self._last + 1)
        share = width // self.multiple
        number = cells % width // chunk
        inside = cells % width % chunk
        mirrored = self._last - number
        owner = torch.minimum(number, mirrored) * self.heads + inside // share
        lane = (number > mirrored) * rows + cells // width
        order = owner.argsort(stable=True)
        sizes = owner.bincount(minlength=self.ranks).tolist()
        own_places = order.split(sizes)[self.rank]
        positions = inputs.get("position_ids", torch.arange(width)[None])
        inputs = {**inputs, "position_ids": positions.expand(rows if self.ring > 1 else -1, -1)}
        for name in BY_CELL & inputs.keys():
            own_cells = self.chunked(inputs[name]).unflatten(1, (self.heads, -1))
            inputs[name] = own_cells[:, self.rank % self.heads]
        return OwnPart(inputs, (lane * share + inside % share)[own_places], own_places, order, tuple(sizes))

    def whole(self, scores: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return the scores ``[scored]`` of all ranks from those ``[own]`` of this one. Collective."""
        if self.group is None:
            return scores
        gathered = _Gather.apply(scores, self, sizes)  # type: ignore[no-untyped-call]  # torch gives it no types
        return cast(torch.Tensor, gathered)


ALONE = SequenceGroup()


def sequence_group(pool: dist.ProcessGroup, ranks: int) -> SequenceGroup:
    """Return the ranks that share tokens with this one; see ``row_group``."""
    rows = row_group(pool, ranks, "sequence_parallel")
    return SequenceGroup(rows.group, rows.rank, rows.ranks)


def over_heads(group: SequenceGroup, model: Any) -> SequenceGroup:
    """Return a group in rings, of as many ranks as the key heads of a transformers model ask for."""
    if group.ranks == 1:
        return group  # a model without attention has no heads
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return replace(group, ring=ring_ranks(heads, group.ranks))


def row_group(pool: dist.ProcessGroup, ranks: int, setting: str) -> RowGroup:
    """Return the group of this rank: so many consecutive ones of a pool. A collective within each group.

    Raises:
        ValueError: the pool does not consist of such groups, as a ``setting`` asks for.
    """
    if ranks == 1:
        return RowGroup()
    if pool.size() % ranks:
        raise ValueError(f"{pool.size()} ranks can't be shared out in groups of {ranks} ({setting})")
    first_rank = pool.rank() // ranks * ranks
    members = dist.get_process_group_ranks(pool)[first_rank : first_rank + ranks]
    group = dist.new_group(members, timeout=FOREVER, use_local_synchronization=True)
    return RowGroup(group, pool.rank() - first_rank, ranks)


class _Gather(torch.autograd.Function):
    """Gathers scores of all ranks; each propagates the gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, own_scores: torch.Tensor, group: SequenceGroup, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.own = group.rank, sizes
        room = own_scores.new_zeros(max(1, *sizes))
        room[: len(own_scores)] = own_scores
        rank_scores = [torch.empty_like(room) for _ in sizes]
        dist.all_gather(rank_scores, room, group=group.group)
        return torch.cat([scores[:size] for scores, size in zip(rank_scores, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rank, sizes = ctx.own
        return gradient.split(sizes)[rank], None, None
