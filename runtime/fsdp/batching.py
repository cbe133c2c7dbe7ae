"""Cut a rank's rows into mini-batches, and those into micro-batches of bounded size.

Shapes: rows = sequences; ``[rows, columns]`` is padded on the right; ``[scored]`` is one entry for each token
that wants a log-prob or a value, row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.engines import Totals
from rlgraph.nodes.ragged import Ragged
from rlgraph.runtime.fsdp.tally import over_ranks


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads, and where its results belong.

    ``input_ids`` ends before the last scored token: nothing asks what follows it. There is no attention mask,
    as under causal attention no token sees the padding to its right, and without one the fast kernels apply.
    """

    columns: dict[str, Any]  # tokens, loss_mask and whatever else was given, cut to these rows
    input_ids: torch.Tensor  # int64 [rows, columns]
    keep: torch.Tensor  # bool [rows, columns]: where the next token is scored
    labels: torch.Tensor  # int64 [scored]
    places: torch.Tensor  # int64 [scored]: where each belongs in the flat tokens

    def scatter(self, scores: torch.Tensor) -> Ragged:
        """Scores ``[scored]`` as a column ``[rows, tokens]``, 0 where nothing is scored."""
        tokens: Ragged = self.columns["tokens"]
        empty = torch.zeros(len(tokens.values), dtype=scores.dtype, device=scores.device)
        return tokens.like(empty.index_copy(0, self.places, scores))


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
    columns: Mapping[str, Any], budget: int, device: torch.device, subset: torch.Tensor | None = None
) -> list[MicroBatch]:
    """Micro-batches of the rows in ``subset`` (all by default), placed on ``device``."""
    wanted = scored(columns["loss_mask"])
    lengths = columns_read(wanted)
    subset = torch.arange(len(lengths)) if subset is None else subset
    return [
        _micro_batch({name: cut(column, subset[rows]) for name, column in columns.items()}, device)
        for rows in micro_batch_rows(lengths[subset], budget)
    ]


def mini_batches(
    columns: Mapping[str, Any],
    rows: torch.Tensor,
    total_rows: int,
    minibatches: int,
    budget: int,
    device: torch.device,
    group: dist.ProcessGroup,
) -> list[MiniBatch]:
    """This rank's part of each mini-batch, with counts over all ranks. A collective.

    Args:
        columns: of this rank's rows.
        rows: int64 ``[rows]``, their numbers in the whole batch of ``total_rows``.
        total_rows: see ``minibatch_rows``, as ``minibatches``.
        budget: tokens of a micro-batch, padding included.
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
    tokens, wanted = columns["tokens"], scored(columns["loss_mask"])
    width = int(columns_read(wanted).max())
    keep = torch.zeros(len(tokens), width, dtype=torch.bool)
    next_wanted = wanted.padded()[:, 1 : width + 1]
    keep[:, : next_wanted.shape[1]] = next_wanted
    input_ids = torch.zeros(len(tokens), width, dtype=torch.int64)
    read = tokens.padded()[:, :width]
    input_ids[:, : read.shape[1]] = read
    places = wanted.values.nonzero().squeeze(1)
    on_device = {
        name: column.to(device) if hasattr(column, "to") else column for name, column in columns.items()
    }
    tensors = (input_ids, keep, tokens.values[places], places)
    return MicroBatch(on_device, *(tensor.to(device) for tensor in tensors))
