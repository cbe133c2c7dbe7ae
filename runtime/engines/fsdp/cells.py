"""The places of packed rows' tokens in a forward pass, and which of them see each other.

Shapes: ``[rows]`` samples; ``[lanes, width]`` what a forward pass reads. A block is ``BLOCK`` cells wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from rlgraph.costs.efficiency import Kernel
from rlgraph.costs.limits import BLOCK
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines.fsdp.packing import PackedLane
from rlgraph.runtime.engines.sequence.groups import ALONE, SequenceGroup

ALIGNED = 8  # what CUDA's kernels want the width of a mask to be a multiple of


@dataclass(frozen=True)
class Cells:
    """The cells that a pass reads, and where each of its rows' tokens stands in them.

    A cell is ``lane * width + column``. Tensors are on the host.
    """

    input_ids: torch.Tensor  # int64 [lanes, width]
    positions: torch.Tensor  # int64 [lanes, width]
    unit: torch.Tensor  # int64 [lanes, width]: which unit a cell belongs to, -1 where there is none
    member: torch.Tensor  # int64 [lanes, width]: which row of the unit, 0 for the prompt
    prompt_at: torch.Tensor  # int64 [rows]: the cell of the first token of a row's prompt
    own_at: torch.Tensor  # int64 [rows]: the cell that its first own token has, if it has one
    prompt: torch.Tensor  # int64 [rows]: tokens of its prompt

    def cell(self, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Return where token ``place [k]`` of ``row [k]`` stands: int64 ``[k]``."""
        own_place = place - self.prompt[row]
        return torch.where(own_place < 0, self.prompt_at[row] + place, self.own_at[row] + own_place)

    def mask(self, dtype: torch.dtype, device: torch.device, sequence: SequenceGroup = ALONE) -> torch.Tensor:
        """Return what to add to attention scores: ``[lanes, 1, width, width]``, 0 or minus infinity.

        Of ranks that share the tokens, one in a ring has a lane for each of its chunks:
        ``[lanes x chunks, 1, chunk, width]``.
        """
        column = torch.arange(self.unit.shape[1], device=device).expand(self.unit.shape)
        cells = self.unit.to(device), self.member.to(device), column
        own_unit, own_member, own_column = (sequence.chunked(tensor)[:, :, None] for tensor in cells)
        unit, member, column = (tensor.repeat(len(sequence.chunks), 1)[:, None, :] for tensor in cells)
        visible = (own_unit == unit).logical_and_(own_column >= column)
        visible &= (member == 0) | (own_member == member)
        zeros = torch.zeros(visible.shape, dtype=dtype, device=device)
        return zeros.masked_fill_(~visible, float("-inf"))[:, None]


def kernel_of(lane: PackedLane) -> Kernel:
    """Return what attends to a lane without a dense mask."""
    return "flex" if any(len(unit.spans) > 1 for unit in lane) else "varlen"


def width_of(lanes: Sequence[PackedLane], kernel: Kernel, sequence: SequenceGroup = ALONE) -> int:
    """Return the common width of lanes: that of the longest, up to what the kernel wants, and the ranks that
    share it."""
    longest = max(1, *(sum(unit.length for unit in lane) for lane in lanes))
    multiple = alignment(kernel, sequence)
    return -(-longest // multiple) * multiple


def alignment(kernel: Kernel, sequence: SequenceGroup = ALONE) -> int:
    """Return what the width of a lane is a multiple of; so is each chunk that a ring cuts it into."""
    chunks = sequence.multiple // sequence.heads
    return lcm((BLOCK if kernel == "flex" else ALIGNED) * chunks, sequence.multiple)


def scores_of(lane: PackedLane) -> int:
    """Return how many attention scores ``kernel_of(lane)`` computes: pairs of tokens, or whole blocks."""
    if kernel_of(lane) == "varlen":
        return sum(unit.length * (unit.length + 1) // 2 for unit in lane)
    return int((_pairs(lane, width_of([lane], "flex")) > 0).sum()) * BLOCK**2


def row_ends(lane: PackedLane, width: int, device: torch.device) -> torch.Tensor:
    """Return where each row of a lane ends, which shares no prompt: int32 ``[1, 1, longest, rows + 1]``.

    The ends, from 0 on, are repeated in a view as often as the longest row has tokens: varlen attention wants
    that number on the host, where shapes are. Empty cells are a row too, as a result is wanted for all.
    """
    lengths = torch.tensor([0, *(unit.length for unit in lane)])
    lengths = torch.cat([lengths, width - lengths.sum()[None]])
    return lengths.cumsum(0).int().to(device).expand(1, 1, int(lengths.max()), -1)


def block_mask(
    lane: PackedLane, cells: Cells, device: torch.device, sequence: SequenceGroup = ALONE
) -> BlockMask:
    """Return what flex attention wants to know of one lane: which blocks see which, and which cells.

    Of a rank in a ring the queries are those of its chunks, one behind the other.
    """
    width = cells.unit.shape[1]
    queries = sequence.chunked(torch.arange(width)[None]).flatten()
    rows = queries[::BLOCK] // BLOCK
    pairs = _pairs(lane, width)[rows]
    full = (pairs == BLOCK**2) & (rows[:, None] != torch.arange(pairs.shape[1]))
    # those of the diagonal are causal
    partial_count, partial_blocks = _ordered((pairs > 0) & ~full)
    full_count, full_blocks = _ordered(full)
    unit, member = (tensor[0].int().to(device) for tensor in (cells.unit, cells.member))
    column = queries.int().to(device) if sequence.ring > 1 else None

    def sees(_lane: Any, _head: Any, query: Any, key: Any) -> Any:
        query = query if column is None else column[query]
        same_branch = (member[key] == 0) | (member[query] == member[key])
        return (query >= key) & (unit[query] == unit[key]) & same_branch

    return BlockMask.from_kv_blocks(
        partial_count.to(device),
        partial_blocks.to(device),
        full_count.to(device),
        full_blocks.to(device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(queries), width),
    )


def _pairs(lane: PackedLane, width: int) -> torch.Tensor:
    """Return the pairs of cells in two blocks that see each other: float32 ``[blocks, blocks]``, exact.

    On the diagonal they are those before causality, above it none.
    """
    stretches, _ = _stretches([lane], width)
    used = sum(unit.length for unit in lane)
    stretches.append((0, 0, width - used, used, -1, 0))  # empty cells see each other
    _, _, length, cell, _, member = torch.tensor(stretches).unbind(1)
    edges = torch.arange(0, width + 1, BLOCK)[:, None]
    cut = torch.minimum(cell + length, edges[1:]) - torch.maximum(cell, edges[:-1])
    block_cells = cut.clamp(min=0).float()  # [blocks, parts]: the cells of each part
    prompts = block_cells[:, torch.arange(len(stretches)) - member]
    return (block_cells @ (block_cells + prompts * (member > 0)).T).tril()


def _ordered(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many are true in each row, and the columns with those first: int32 ``[1, 1, rows, ...]``."""
    columns = mask.int().argsort(dim=-1, descending=True, stable=True)
    return mask.sum(-1).int()[None, None], columns.int()[None, None]


def cells_of(tokens: Ragged, lanes: Sequence[PackedLane], width: int) -> Cells:
    """Lay rows out; ``tokens`` has them in the order of ``lanes``, whatever their spans call them."""
    stretches, rows = _stretches(lanes, width)
    row, begin, length, cell, unit, member = torch.tensor(stretches, dtype=torch.int64).view(-1, 6).unbind(1)
    step = torch.arange(int(length.sum())) - (length.cumsum(0) - length).repeat_interleave(length)
    places = cell.repeat_interleave(length) + step

    def filled(values: torch.Tensor, empty: int = 0) -> torch.Tensor:
        return torch.full((len(lanes) * width,), empty).index_put_((places,), values).view(len(lanes), width)

    source = (tokens.offsets[row] + begin).repeat_interleave(length) + step
    return Cells(
        filled(tokens.values[source]),
        filled(begin.repeat_interleave(length) + step),
        filled(unit.repeat_interleave(length), -1),
        filled(member.repeat_interleave(length)),
        *torch.tensor(rows, dtype=torch.int64).view(-1, 3).unbind(1),
    )


def _stretches(
    lanes: Sequence[PackedLane], width: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return stretches of cells (row, first token, tokens, first cell, unit, member), and ``Cells``' rows."""
    stretches = list[tuple[int, ...]]()
    rows = list[tuple[int, ...]]()
    number = 0
    for index, lane in enumerate(lanes):
        cell = index * width
        for unit in lane:
            prompt = unit.spans[0].prompt
            start = cell
            number = number + 1
            stretches.append((len(rows), 0, prompt, cell, number, 0))
            cell += prompt
            for member, span in enumerate(unit.spans, 1):
                stretches.append((len(rows), prompt, span.own, cell, number, member))
                rows.append((start, cell, prompt))
                cell += span.own
    return stretches, rows
