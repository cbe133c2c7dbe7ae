"""Cut a rank's rows into mini-batches, and those into micro-batches of bounded size.

Shapes: rows = sequences; ``[rows, columns]`` is padded on the right; ``[scored]`` is one entry for each token
that wants a log-prob or a value, row by row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from rlgraph.costs.efficiency import ATTENTION, Kernel
from rlgraph.costs.limits import BLOCK, MASK
from rlgraph.nodes.support.ragged import Ragged, taken
from rlgraph.ops.interfaces import Totals
from rlgraph.runtime.engines.fsdp.cells import (
    alignment,
    block_mask,
    cells_of,
    kernel_of,
    row_ends,
    scores_of,
    width_of,
)
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch, places_of, read_cells, routed, uses_in_turn
from rlgraph.runtime.engines.fsdp.packing import PackedLane, PromptGroup, alike, lanes_of
from rlgraph.runtime.engines.metric_sums import over_ranks
from rlgraph.runtime.engines.sequence.groups import ALONE, SequenceGroup

ALONE_IN_PASS = {"": False}  # one term, whose columns have no prefix, and each row is a sequence


@dataclass(frozen=True)
class Budget:
    """The limits by which rows are cut into micro-batches."""

    tokens: int  # those of one forward pass on the ranks that share it, padding included
    share: float | None = None  # see attention_share; None: rows are not packed
    dtype: torch.dtype = torch.float32  # the attention scores' type
    mask: bool = True  # packed rows need a dense mask
    sequence: SequenceGroup = ALONE  # the ranks that share it: they divide its width
    counts: bool = False  # micro-batches say how many rows have a token in a cell

    def work(self, tokens: int, scores: float, kernel: Kernel) -> float:
        """Return the work of a pass in which a kernel computes so many attention scores.

        1 is that of a token beside its attention.
        """
        return tokens + (self.share or 0) * scores / ATTENTION[kernel]

    def widths(self, wanted: Ragged) -> torch.Tensor:
        """Return how wide a pass has to be to score what is wanted of each row: int64 ``[rows]``."""
        multiple = self.sequence.multiple
        return -(-columns_read(wanted) // multiple) * multiple


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step: this rank's micro-batches, and counts over all ranks."""

    batches: list[MicroBatch]
    totals: tuple[Totals, ...]  # of each term that is computed of these rows
    passes: int  # micro-batches of the rank that has most; every rank runs as many
    read: int = 0  # tokens that passes read, over all ranks, where they are counted


def scored(loss_mask: Ragged) -> Ragged:
    """Return the mask without each row's first token, which nothing precedes: bool ``[rows, tokens]``."""
    values = loss_mask.values.clone()
    values[loss_mask.offsets[:-1][loss_mask.lengths > 0]] = False
    return loss_mask.like(values)


def columns_read(wanted: Ragged) -> torch.Tensor:
    """Return the tokens per row that a pass must read to score those ``wanted``: int64 ``[rows]``, >= 1."""
    _, row, place = places_of(wanted)
    return torch.ones(len(wanted), dtype=torch.int64).scatter_reduce(0, row, place, "amax")


def micro_batch_rows(lengths: torch.Tensor, budget: int) -> list[torch.Tensor]:
    """Group rows so that rows times the longest stays within a budget of tokens, longest rows first.

    ``lengths`` is int64 ``[rows]``; of each micro-batch the indices of its rows are returned. A row longer
    than the budget goes alone.

    Example:
        >>> [rows.tolist() for rows in micro_batch_rows(torch.tensor([2, 8, 3]), 8)]
        [[1], [2, 0]]
    """
    order = lengths.argsort(descending=True, stable=True)
    batches = []
    start = 0
    while start < len(order):
        size = max(1, budget // int(lengths[order[start]]))
        batches.append(order[start : start + size])
        start += size
    return batches


def minibatch_rows(rows: torch.Tensor, total_rows: int, minibatches: int) -> list[torch.Tensor]:
    """Return for each mini-batch which of this rank's rows are in it, as indices into ``rows``.

    ``rows``, int64 ``[rows]``, are their numbers in the whole batch of ``total_rows``, R: row r belongs to
    mini-batch ``r * minibatches // R``.
    """
    owner = rows * minibatches // max(1, total_rows)
    return [(owner == minibatch).nonzero().squeeze(1) for minibatch in range(minibatches)]


def cut(columns: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """Return the given rows of columns."""
    return {name: taken(column, rows) for name, column in columns.items()}


def micro_batches(
    columns: Mapping[str, Any], budget: Budget, device: torch.device, subset: torch.Tensor | None = None
) -> list[MicroBatch]:
    """Return micro-batches of the rows in ``subset`` (all by default), placed on ``device``."""
    columns = columns if subset is None else cut(columns, subset)
    wanted = scored(columns["loss_mask"])
    lengths = budget.widths(wanted)
    side_by_side = micro_batch_rows(lengths, budget.tokens)
    longest = [int(lengths[rows].max()) for rows in side_by_side]
    areas = [(len(rows) * width, width) for rows, width in zip(side_by_side, longest, strict=True)]
    work = sum(budget.work(area, area * width / 2, "causal") for area, width in areas)
    if packed := _packed(columns["tokens"], wanted, budget, work, max(longest, default=0)):
        return [_packed_batch(columns, lanes, budget, device) for lanes in packed]
    return [_micro_batch(cut(columns, rows), budget, device) for rows in side_by_side]


def _packed(
    tokens: Ragged, wanted: Ragged, budget: Budget, work: float, longest: int
) -> list[list[PackedLane]]:
    """Return each micro-batch's lanes, of the layout with least work; none if that is not below ``work``."""
    best: list[list[PackedLane]] = []
    units = alike(tokens, wanted) if budget.share is not None else []
    layouts = _masked(units, longest, budget) if budget.mask else _unmasked(units, budget)
    for lanes, needed in layouts:
        if needed < work:
            best = lanes
            work = needed
    return best


def _masked(
    units: Sequence[PromptGroup], longest: int, budget: Budget
) -> Iterator[tuple[list[list[PackedLane]], float]]:
    """Yield the lanes of each micro-batch and their work, under a dense mask: for each width."""
    for width in _widths(units, longest, budget):
        lanes = lanes_of(units, width)
        count = max(1, budget.tokens // width)
        work = budget.work(len(lanes) * width, len(lanes) * width * width, "mask")
        yield [lanes[i : i + count] for i in range(0, len(lanes), count)], work


def _unmasked(units: Sequence[PromptGroup], budget: Budget) -> Iterator[tuple[list[list[PackedLane]], float]]:
    """Yield the same without a mask, one lane per micro-batch: with prompts shared, and each row alone."""
    alone = [PromptGroup((span,)) for unit in units for span in unit.spans]
    alone.sort(key=lambda unit: -unit.length)
    width = budget.tokens // BLOCK * BLOCK or budget.tokens
    for groups in (units, alone) if len(alone) > len(units) else (units,):
        lanes = lanes_of(groups, width)
        work = 0.0
        for lane in lanes:
            kernel = kernel_of(lane)
            work += budget.work(width_of([lane], kernel, budget.sequence), scores_of(lane), kernel)
        yield [[lane] for lane in lanes], work


def _widths(units: Sequence[PromptGroup], longest: int, budget: Budget) -> list[int]:
    """Return widths of lanes to try: multiples of the longest row, less so far as lanes would not be full."""
    total = sum(unit.length for unit in units)
    tokens = budget.tokens
    aligned = alignment("mask", budget.sequence)
    near = [max(longest, min(times * longest, tokens)) for times in (1, 2, 4, 8)]
    even = {max(longest, -(-total // -(-total // width))) for width in near if total}
    widths = {-(-width // aligned) * aligned for width in even}
    return sorted(width for width in widths if width * max(width, tokens) <= MASK)


def mini_batches(
    columns: Mapping[str, Any],
    rows: torch.Tensor,
    total_rows: int,
    minibatches: int,
    budget: Budget,
    device: torch.device,
    group: dist.ProcessGroup,
    alike: int = 1,
    merged: Mapping[str, bool] = ALONE_IN_PASS,
) -> list[MiniBatch]:
    """Return this rank's part of each mini-batch, with counts over all ranks. A collective.

    ``columns`` are of this rank's rows, which so many consecutive ranks have ``alike``; for ``rows``,
    ``total_rows`` and ``minibatches`` see ``minibatch_rows``. ``merged`` has the terms of the pass by the
    prefixes of their columns: where it is true, rows of one number are one sequence, totals count the
    numbers, and ``sequence_tokens`` are those of each row's sequence.
    """
    own_rows = minibatch_rows(rows, total_rows, minibatches)
    tokens = {prefix: columns[f"{prefix}loss_mask"].sum() for prefix in merged}
    for prefix, merges in merged.items():
        if not merges:
            continue
        per_number = torch.zeros(total_rows, dtype=torch.int64).index_add(0, rows, tokens[prefix])
        sequence_tokens = over_ranks(per_number, group)[::alike].sum(0)[rows]
        columns = {**columns, f"{prefix}sequence_tokens": sequence_tokens}
    numbers = [len(several) for several in minibatch_rows(torch.arange(total_rows), total_rows, minibatches)]
    batches = []
    counts = []
    for minibatch in own_rows:
        passes = micro_batches(columns, budget, device, minibatch)
        tokens_read = sum(batch.read for batch in passes)
        trained = [int(tokens_of_term[minibatch].sum()) for tokens_of_term in tokens.values()]
        batches.append(passes)
        counts.append([len(minibatch), len(passes), tokens_read, *trained])
    # [ranks, minibatches, 3 and the terms], of the ranks that have the same rows the first
    ranks = over_ranks(torch.tensor(counts), group)[::alike]
    sums = ranks.sum(0).tolist()
    most = ranks[:, :, 1].amax(0).tolist()
    minibatch_list = []
    for micro, sums_of_batch, most_passes, number_count in zip(batches, sums, most, numbers, strict=True):
        row_count, _, tokens_read, *trained = sums_of_batch
        sequences = [number_count if merges else row_count for merges in merged.values()]
        totals = tuple(map(Totals, trained, sequences))
        minibatch_list.append(MiniBatch(micro, totals, most_passes, tokens_read))
    return minibatch_list


def placeholder(budget: Budget, device: torch.device) -> MicroBatch:
    """Return two short rows, for a rank that has none left while others go on: collectives must pair up.

    A dimension of one would be compiled by itself (torch.compile), on that rank alone.
    """
    width = 2 * budget.sequence.multiple
    tokens = Ragged.of([[0] * (width + 1)] * 2)
    mask = Ragged.of([[False] * width + [True]] * 2, dtype=torch.bool)
    return _micro_batch({"tokens": tokens, "loss_mask": mask}, replace(budget, counts=False), device)


def _micro_batch(columns: dict[str, Any], budget: Budget, device: torch.device) -> MicroBatch:
    """Lay rows beside each other, padded on the right."""
    width = int(budget.widths(scored(columns["loss_mask"])).max())
    rows = columns["tokens"].padded()
    inputs = {"input_ids": pad(rows, (0, width - rows.shape[1]))}
    return _on_device(columns, inputs, None, lambda row, place: row * width + place, budget, device)


def _packed_batch(
    columns: Mapping[str, Any], lanes: Sequence[PackedLane], budget: Budget, device: torch.device
) -> MicroBatch:
    """Lay rows end to end; the batch has them in the order in which they lie."""
    row_order = list[int]()
    for lane in lanes:
        for group in lane:
            row_order += [span.row for span in group.spans]
    rows = torch.tensor(row_order)
    columns = cut(columns, rows)
    kernel: Kernel = "mask" if budget.mask else kernel_of(lanes[0])
    cells = cells_of(columns["tokens"], lanes, width_of(lanes, kernel, budget.sequence))
    inputs: dict[str, Any] = {"input_ids": cells.input_ids, "position_ids": cells.positions}
    if kernel == "mask":
        mask = partial(cells.mask, budget.dtype, device, budget.sequence)
        return _on_device(columns, inputs, mask, cells.cell, budget, device)
    (lane,) = lanes
    if kernel == "flex":
        inputs["attention_mask"] = block_mask(lane, cells, device, budget.sequence)
    else:
        inputs["attention_mask"] = row_ends(lane, cells.input_ids.shape[1], device)
    return _on_device(columns, inputs, None, cells.cell, budget, device)


def _on_device(
    columns: dict[str, Any],
    inputs: dict[str, Any],
    mask: Callable[[], torch.Tensor] | None,
    cell: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    budget: Budget,
    device: torch.device,
) -> MicroBatch:
    """Return a micro-batch on a device; ``cell`` says where a row's token stands in the inputs."""
    places, row, place = places_of(scored(columns["loss_mask"]))
    routing = columns.pop("routing", None)
    shape = inputs["input_ids"].shape
    count = 0
    if routing is not None or budget.counts:
        read_tokens, cells = read_cells(columns["tokens"], row, place, cell)
        count = len(read_tokens)
    if routing is not None:
        inputs["routing"] = routed(routing, read_tokens, cells, shape)
    if budget.counts:
        inputs["counted"] = cells.bincount(minlength=shape.numel()).view(shape)
    # the token before says what follows
    share = budget.sequence.share(inputs, cell(row, place - 1))
    labels = columns["tokens"].values[places][share.own]
    moved = {}
    for name, column in columns.items():
        moved[name] = column.to(device) if hasattr(column, "to") else column
    chosen = share.inputs.pop("routing", None)
    inputs = {name: tensor.to(device) for name, tensor in share.inputs.items()}
    counted = inputs.pop("counted", None)
    return MicroBatch(
        columns=moved,
        inputs=inputs,
        mask=mask,
        cells=share.cells.to(device),
        labels=labels.to(device),
        places=places[share.order].to(device),
        turns=tuple(turn.to(device) for turn in uses_in_turn(share.cells)),
        sequence=budget.sequence,
        sizes=share.sizes,
        routing=chosen,
        counted=counted,
        read=count,
    )
