"""Maps each weight of a checkpoint to its place in the parameters that transformers makes of it.

transformers holds a mixture's experts in fused parameters, and renames weights of some families. Checkpoints
keep the names that others know, such as SGLang. A ``Piece`` is one weight of the checkpoint as a view of a
parameter::

    model.layers.0.mlp.experts.7.up_proj.weight  [width, hidden]  =  experts.gate_up_proj[7, width:]
    model.layers.0.mlp.experts.7.down_proj.weight [hidden, width] =  experts.down_proj[7]
    model.norm.weight                             [hidden]        =  model.norm.weight
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlgraph.runtime.engines.weights.transfer import Named


@dataclass(frozen=True)
class Piece:
    """A weight of the checkpoint: its name there, and where it lies in a contiguous parameter.

    ``stride`` and ``offset`` count numbers, as ``torch.as_strided`` does.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the piece as a view of its parameter."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)

    def rows_of(self, rows: torch.Tensor, first: int, width: int) -> tuple[slice, torch.Tensor] | None:
        """Return a shard's part of the piece: rows of the piece, and the view of the shard that holds them.

        The shard is consecutive ``rows`` of the parameter, contiguous, from number ``first`` on; each has
        ``width`` numbers.
        """
        start, inside = divmod(self.offset, width)
        spans = self._spans(width)
        stop = start + (self.shape[0] if spans else 1)
        low, high = max(start, first), min(stop, first + (len(rows) if rows.dim() else 1))
        if low >= high:
            return None
        shape = (high - low, *self.shape[1:]) if spans else self.shape
        offset = rows.storage_offset() + (low - first) * width + inside
        return (
            slice(low - start, high - start) if spans else slice(None),
            rows.as_strided(shape, self.stride, offset),
        )

    def is_of_rows(self, width: int) -> bool:
        """Return whether it is the same part of consecutive rows, or a part of one row."""
        steps = list(zip(self.shape, self.stride, strict=True))[self._spans(width) :]
        return self.offset % width + sum((size - 1) * step for size, step in steps) < width

    def _spans(self, width: int) -> bool:
        """Return whether its rows are rows of the parameter."""
        return bool(self.stride) and self.stride[0] == width


Pieces = Mapping[str, list[Piece]]  # pieces by the parameter's name


def pieces_of(model: Any, stored: Iterable[str]) -> Pieces:
    """Return the pieces of every parameter and persistent buffer; a tied one has some per name.

    Args:
        model: a transformers model, neither adapted nor sharded, whose weights may have no memory.
        stored: names of the weights in its checkpoint; of what transformers would convert, only what these
            ask for is converted. Without any, the names are those of a checkpoint that transformers writes.

    Raises:
        ValueError: a weight of the checkpoint is not a part of one parameter's rows.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = list(stored)
    model._weight_conversions = _used(model, names) if names else None
    state = {name: torch.empty(t.shape, device="meta") for name, t in model.state_dict().items()}
    with _NoCopies():
        saved = revert_weight_conversion(model, dict(state))
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in state.items()}
    pieces: dict[str, list[Piece]] = {name: [] for name in state}
    for name, view in saved.items():
        piece = Piece(name, tuple(view.shape), view.stride(), int(view.storage_offset()))
        owner = owners.get(view.untyped_storage()._cdata)
        if owner is None or not piece.is_of_rows(math.prod(state[owner].shape[1:])):
            raise ValueError(
                f"{model.config.model_type}: the checkpoint's {name} is no part of rows of one parameter in "
                f"transformers; models of this type can't be trained or served"
            )
        pieces[owner].append(piece)
    return pieces


def in_pieces(tensors: Iterable[Named], pieces: Pieces) -> Iterator[Named]:
    """Yield full parameters and buffers as the checkpoint's weights: views, under its names."""
    for name, parameter in tensors:
        yield from ((piece.name, piece.of(parameter)) for piece in pieces[name])


def _used(model: Any, names: list[str]) -> list[Any]:
    """Return the conversions that transformers would apply to a checkpoint with these names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    for name in sorted(names, key=dot_natural_key):
        rename_source_key(name, renamings, converters)
    return [conversion for conversion in conversions if conversion.was_used()]


class _NoCopies(TorchFunctionMode):
    """Leaves tensors as they lie, so that pieces cut from one stay views of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer", "")
