"""A micro-batch on a device: the tokens of one forward pass, and the places whose scores are asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines.routing import OWN
from rlgraph.runtime.engines.sequence.groups import ALONE, SequenceGroup


@dataclass(frozen=True)
class MicroBatch:
    """A forward pass's inputs, and the places of its results.

    ``input_ids`` ends before the last scored token: nothing asks what follows it. Rows that lie beside each
    other need no mask: under causal attention no token sees the padding to its right, and without one the
    fast kernels apply. Packed rows have positions, and a mask or what ``attention.py`` takes in its place.

    Where ranks share the tokens, ``[own]`` are the scored ones of this rank, else ``[scored]``.
    """

    columns: dict[str, Any]  # tokens, loss_mask and all other columns, cut to these rows
    inputs: dict[str, Any]  # the model's arguments: input_ids int64 [lanes, width or share], ...
    mask: Callable[[], torch.Tensor] | None  # makes the dense mask of packed rows, where they need one
    cells: torch.Tensor  # int64 [own]: after which of the cells of input_ids the token is scored
    labels: torch.Tensor  # int64 [own]
    places: torch.Tensor  # int64 [scored]: where each belongs in the flat tokens
    turns: tuple[torch.Tensor, ...]  # places in ``cells``: the first use of each cell, then the second, ...
    sequence: SequenceGroup = ALONE
    sizes: tuple[int, ...] = ()  # of each rank of it, how many it scores
    # integers [lanes, width or share, layers, k], on the host: the experts of each cell of input_ids
    routing: torch.Tensor | None = None
    # int64 [lanes, width or share]: how many rows have a token in each cell; None: nobody asks
    counted: torch.Tensor | None = None
    read: int = 0  # their sum, over the whole width

    def arguments(self) -> dict[str, Any]:
        """Return the model's arguments. A dense mask is made per pass: all of them together would not fit."""
        return {**self.inputs, "attention_mask": self.mask()} if self.mask else self.inputs

    def scatter(self, scores: torch.Tensor) -> Ragged:
        """Return scores ``[scored]`` as a column ``[rows, tokens]``, 0 where nothing is scored."""
        tokens: Ragged = self.columns["tokens"]
        empty = torch.zeros(len(tokens.values), dtype=scores.dtype, device=scores.device)
        return tokens.like(empty.index_copy(0, self.places, scores))

    def whole(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores ``[scored]`` of all ranks that share the tokens, from this one's ``[own]``."""
        return self.sequence.whole(scores, self.sizes)

    def picked(self, values: torch.Tensor) -> torch.Tensor:
        """Pick values ``[lanes, width, ...]`` after which a token is scored: ``[own, ...]``."""
        flat = values.flatten(0, 1)
        picked = _Pick.apply(flat, self.cells, *self.turns)  # type: ignore[no-untyped-call]  # torch gives it no types
        return cast(torch.Tensor, picked)


class _Pick(torch.autograd.Function):
    """Picks rows by their numbers, one perhaps several times; gradients are summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, cells: torch.Tensor, *turns: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cells, *turns)
        ctx.shape = values.shape
        return values[cells]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        cells, *turns = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape)
        for turn in turns:
            total[cells[turn]] += gradient[turn]
        return total, None, *(None for _ in turns)


def places_of(wanted: Ragged) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each wanted token's place in the flat tokens, its row, and its place there: int64 ``[k]``."""
    flat = wanted.values.nonzero().squeeze(1)
    row = wanted.row_of[flat]
    return flat, row, flat - wanted.offsets[row]


def read_cells(
    tokens: Ragged,
    row: torch.Tensor,
    place: torch.Tensor,
    cell: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the flat tokens are read, and the cell of each: int64 ``[read]``.

    ``row`` and ``place`` are of the tokens that want a score: those before the last of a row are read. A cell
    of a prompt that rows share comes once for each.
    """
    ends = torch.zeros(len(tokens), dtype=torch.int64).scatter_reduce(0, row, place, "amax")
    (read_tokens,) = (tokens.place_of < ends[tokens.row_of]).nonzero(as_tuple=True)
    return read_tokens, cell(tokens.row_of[read_tokens], tokens.place_of[read_tokens])


def routed(
    routing: Ragged, read_tokens: torch.Tensor, cells: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """Return the choice of experts for each cell ``[lanes, width, layers, k]``, from the column of the rows.

    For ``read_tokens`` and ``cells`` see ``read_cells``. A prompt that rows share is routed as that of the
    first of them; an empty cell chooses by itself.
    """
    none = len(routing.values)
    first_reader = torch.full((shape.numel(),), none).scatter_reduce(0, cells, read_tokens, "amin")
    out: torch.Tensor = routing.values.new_full((shape.numel(), *routing.values.shape[1:]), OWN)
    out[first_reader < none] = routing.values[first_reader[first_reader < none]]
    chosen: torch.Tensor = out.unflatten(0, shape)
    return chosen


def uses_in_turn(cells: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Group the places in ``cells [k]`` by how often a cell came before: no group has a cell twice.

    The cells are on the host: how many turns there are is a number that a device would be waited for.
    """
    if len(cells) == 0:
        return ()
    ordered, places = cells.sort(stable=True)
    is_first_use = torch.ones_like(ordered, dtype=torch.bool)
    is_first_use[1:] = ordered[1:] != ordered[:-1]
    count = torch.arange(len(cells))
    earlier_uses = count - torch.where(is_first_use, count, 0).cummax(0).values
    turns = int(earlier_uses.max()) + 1
    return tuple(places[earlier_uses == turn] for turn in range(turns))
