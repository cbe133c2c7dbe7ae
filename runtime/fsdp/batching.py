"""Cut a rank's rows into mini-batches, and those into micro-batches of bounded size.

Shapes: rows = sequences; ``[rows, columns]`` is padded on the right; ``[scored]`` is one entry for each token
that wants a log-prob or a value, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rlgraph.engines import Totals
from rlgraph.nodes.ragged import Ragged
from rlgraph.runtime.fsdp.packing import (
    ALIGNED,
    LARGEST,
    Lane,
    Span,
    Unit,
    alike,
    cells_of,
    lanes_of,
    spans_of,
)
from rlgraph.runtime.fsdp.tally import over_ranks


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads, and where its results belong.

    ``input_ids`` ends before the last scored token: nothing asks what follows it. Rows that lie beside each
    other need no mask: under causal attention no token sees the padding to its right, and without one the
    fast kernels apply. Packed rows have positions and a mask.
    """

    columns: dict[str, Any]  # tokens, loss_mask and whatever else was given, cut to these rows
    inputs: dict[str, torch.Tensor]  # of the model: input_ids int64 [lanes, width], ...
    mask: Callable[[], torch.Tensor] | None  # of packed rows
    cells: torch.Tensor  # int64 [scored]: after which of the cells of input_ids the token is scored
    labels: torch.Tensor  # int64 [scored]
    places: torch.Tensor  # int64 [scored]: where each belongs in the flat tokens

    def given(self) -> dict[str, torch.Tensor]:
        """What the model is given. A mask is made for the pass: all batches' together would not fit."""
        return {**self.inputs, "attention_mask": self.mask()} if self.mask else self.inputs

    def scatter(self, scores: torch.Tensor) -> Ragged:
        """Scores ``[scored]`` as a column ``[rows, tokens]``, 0 where nothing is scored."""
        tokens: Ragged = self.columns["tokens"]
        empty = torch.zeros(len(tokens.values), dtype=scores.dtype, device=scores.device)
        return tokens.like(empty.index_copy(0, self.places, scores))

    def picked(self, values: torch.Tensor) -> torch.Tensor:
        """Of values ``[lanes, width, ...]`` those after which a token is scored: ``[scored, ...]``."""
        return cast(torch.Tensor, _Pick.apply(values.flatten(0, 1), self.cells))


class _Pick(torch.autograd.Function):
    """Rows by their numbers, one perhaps several times; their gradients are summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cells)
        ctx.shape = values.shape
        return values[cells]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (cells,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape)
        for turn in _turns(cells):  # the first use of each cell, then the second, ...
            total[cells[turn]] += gradient[turn]
        return total, None


def _turns(cells: torch.Tensor) -> list[torch.Tensor]:
    """Places in ``cells [k]``, apart by how often a cell came before: no cell twice in one of them."""
    ordered, places = cells.sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    count = torch.arange(len(cells), device=cells.device)
    before = count - torch.where(first, count, 0).cummax(0).values if len(cells) else count
    return [places[before == turn] for turn in range(int(before.max()) + 1 if len(cells) else 0)]


@dataclass(frozen=True)
class Budget:
    """How rows are cut into micro-batches."""

    tokens: int  # of one forward pass, padding included
    share: float | None = None  # see attention_share; None: rows are not packed
    dtype: torch.dtype = torch.float32  # of the attention scores

    def work(self, tokens: int, seen: float) -> float:
        """Of a pass over ``tokens``, each of which sees so many columns; 1 for a token that sees none."""
        return tokens * (1 + (self.share or 0) * seen)


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step trains on: this rank's micro-batches, and counts over all ranks."""

    batches: list[MicroBatch]
    totals: Totals
    passes: int  # micro-batches of the rank that has most; every rank runs as many


def scored(loss_mask: Ragged) -> Ragged:
    """The loss mask without each row's first token, which nothing precedes: bool ``[rows, tokens]``."""
    values = loss_mask.values.clone()
    values[loss_mask.offsets[:-1][loss_mask.lengths > 0]] = False
    return loss_mask.like(values)


def columns_read(wanted: Ragged) -> torch.Tensor:
    """How many tokens of each row a pass must read to score those ``wanted``: int64 ``[rows]``, >= 1."""
    row, place = wanted.row_of[wanted.values], wanted.values.nonzero().squeeze(1)
    last = torch.ones(len(wanted), dtype=torch.int64)
    return last.scatter_reduce(0, row, place - wanted.offsets[row], "amax")


def micro_batch_rows(lengths: torch.Tensor, budget: int) -> list[torch.Tensor]:
    """Group rows so that rows times the longest stays within a budget, longest rows first.

    Args:
        lengths: int64 ``[rows]``, tokens of each row.
        budget: tokens of a micro-batch, padding included; a row longer than it goes alone.

    Returns:
        Row indices of each micro-batch, int64 ``[rows of the micro-batch]``.

    Example:
        >>> [rows.tolist() for rows in micro_batch_rows(torch.tensor([2, 8, 3]), 8)]
        [[1], [2, 0]]
    """
    order = lengths.argsort(descending=True, stable=True)
    batches, start = [], 0
    while start < len(order):
        size = max(1, budget // int(lengths[order[start]]))
        batches.append(order[start : start + size])
        start += size
    return batches


def minibatch_rows(rows: torch.Tensor, total_rows: int, minibatches: int) -> list[torch.Tensor]:
    """Which of this rank's rows are in each mini-batch.

    Args:
        rows: int64 ``[rows]``, their numbers in the whole batch of ``total_rows``.
        total_rows: R; row r belongs to mini-batch ``r * minibatches // R``.
        minibatches: how many.

    Returns:
        For each mini-batch, indices into ``rows``.
    """
    owner = rows * minibatches // max(1, total_rows)
    return [(owner == minibatch).nonzero().squeeze(1) for minibatch in range(minibatches)]


def cut(column: Any, rows: torch.Tensor) -> Any:
    """The given rows of a column: ``Ragged``, a tensor ``[rows, ...]`` or a list."""
    if isinstance(column, Ragged):
        return column.take(rows)
    return column[rows] if isinstance(column, torch.Tensor) else [column[row] for row in rows.tolist()]


def micro_batches(
    columns: Mapping[str, Any], budget: Budget, device: torch.device, subset: torch.Tensor | None = None
) -> list[MicroBatch]:
    """Micro-batches of the rows in ``subset`` (all by default), placed on ``device``."""
    if subset is not None:
        columns = {name: cut(column, subset) for name, column in columns.items()}
    wanted = scored(columns["loss_mask"])
    lengths = columns_read(wanted)
    beside = micro_batch_rows(lengths, budget.tokens)
    longest = [int(lengths[rows].max()) for rows in beside]
    work = sum(budget.work(len(r) * w, w / 2) for r, w in zip(beside, longest, strict=True))
    if packed := _packed(columns["tokens"], wanted, budget, work, max(longest, default=0)):
        return [_packed_batch(columns, lanes, budget.dtype, device) for lanes in packed]
    return [_micro_batch({k: cut(column, rows) for k, column in columns.items()}, device) for rows in beside]


def _packed(tokens: Ragged, wanted: Ragged, budget: Budget, work: float, longest: int) -> list[list[Lane]]:
    """The lanes of each micro-batch, of the width with the least work; none if that is not below ``work``."""
    best: list[list[Lane]] = []
    if budget.share is None:
        return best
    groups = alike(tokens, spans_of(wanted))
    for width in _widths(groups, longest, budget.tokens):
        lanes = lanes_of(groups, width)
        if (needed := budget.work(len(lanes) * width, width)) < work:
            count = max(1, budget.tokens // width)
            best, work = [lanes[i : i + count] for i in range(0, len(lanes), count)], needed
    return best


def _widths(groups: Sequence[Sequence[Span]], longest: int, tokens: int) -> list[int]:
    """Widths of lanes to try: some times the longest row, and less so far as lanes would not be full."""
    total = sum(Unit(tuple(group)).length for group in groups)
    near = [max(longest, min(times * longest, tokens)) for times in (1, 2, 4, 8)]
    even = {max(longest, -(-total // -(-total // width))) for width in near if total}
    widths = {-(-width // ALIGNED) * ALIGNED for width in even}
    return sorted(width for width in widths if width * max(width, tokens) <= LARGEST)


def mini_batches(
    columns: Mapping[str, Any],
    rows: torch.Tensor,
    total_rows: int,
    minibatches: int,
    budget: Budget,
    device: torch.device,
    group: dist.ProcessGroup,
) -> list[MiniBatch]:
    """This rank's part of each mini-batch, with counts over all ranks. A collective.

    Args:
        columns: of this rank's rows.
        rows: int64 ``[rows]``, their numbers in the whole batch of ``total_rows``.
        total_rows: see ``minibatch_rows``, as ``minibatches``.
        budget: of a micro-batch.
        device: where the micro-batches are placed.
        group: the ranks.
    """
    mine = minibatch_rows(rows, total_rows, minibatches)
    batches = [micro_batches(columns, budget, device, subset) for subset in mine]
    tokens = columns["loss_mask"].sum()
    counts = [[int(tokens[s].sum()), len(s), len(b)] for s, b in zip(mine, batches, strict=True)]
    ranks = over_ranks(torch.tensor(counts), group, device)  # [ranks, minibatches, 3]
    sums, most = ranks.sum(0).tolist(), ranks[:, :, 2].amax(0).tolist()
    return [
        MiniBatch(b, Totals(tokens=n, sequences=k), passes)
        for b, (n, k, _), passes in zip(batches, sums, most, strict=True)
    ]


def placeholder(device: torch.device) -> MicroBatch:
    """One short row, for a rank that has run out of rows while others go on: collectives must pair up."""
    tokens, mask = Ragged.of([[0, 0]]), Ragged.of([[False, True]], dtype=torch.bool)
    return _micro_batch({"tokens": tokens, "loss_mask": mask}, device)


def _micro_batch(columns: dict[str, Any], device: torch.device) -> MicroBatch:
    """Rows beside each other, padded on the right."""
    tokens, wanted = columns["tokens"], scored(columns["loss_mask"])
    width = int(columns_read(wanted).max())
    input_ids = torch.zeros(len(tokens), width, dtype=torch.int64)
    read = tokens.padded()[:, :width]
    input_ids[:, : read.shape[1]] = read
    flat, row, place = _scored_places(wanted)
    return _placed(columns, {"input_ids": input_ids}, None, flat, row * width + place - 1, device)


def _packed_batch(
    columns: Mapping[str, Any], lanes: Sequence[Lane], dtype: torch.dtype, device: torch.device
) -> MicroBatch:
    """Rows end to end; the batch has them in the order in which they lie."""
    rows = torch.tensor([span.row for lane in lanes for unit in lane for span in unit.spans])
    columns = {name: cut(column, rows) for name, column in columns.items()}
    cells = cells_of(columns["tokens"], lanes)
    flat, row, place = _scored_places(scored(columns["loss_mask"]))
    inputs = {"input_ids": cells.input_ids, "position_ids": cells.positions}
    mask = partial(cells.mask, dtype, device)
    return _placed(columns, inputs, mask, flat, cells.cell(row, place - 1), device)


def _scored_places(wanted: Ragged) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each scored token its place in the flat tokens, its row and its place there: int64 ``[scored]``."""
    flat = wanted.values.nonzero().squeeze(1)
    row = wanted.row_of[flat]
    return flat, row, flat - wanted.offsets[row]


def _placed(
    columns: dict[str, Any],
    inputs: dict[str, torch.Tensor],
    mask: Callable[[], torch.Tensor] | None,
    places: torch.Tensor,
    cells: torch.Tensor,
    device: torch.device,
) -> MicroBatch:
    labels = columns["tokens"].values[places]
    moved = {name: column.to(device) if hasattr(column, "to") else column for name, column in columns.items()}
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    return MicroBatch(moved, inputs, mask, *(tensor.to(device) for tensor in (cells, labels, places)))
