"""Maps each weight of a checkpoint to its place in the parameters that transformers makes of it.

transformers holds a mixture's experts in fused parameters, and renames weights of some families. Checkpoints
keep the names that others know, such as SGLang. A ``WeightView`` is one weight of the checkpoint as a view of
a parameter::

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
class WeightView:
    """A weight of the checkpoint: its name there, and where it lies in a contiguous parameter.

    ``stride`` and ``offset`` count numbers, as ``torch.as_strided`` does.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def in_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the weight as a view of its parameter."""
        return parameter.as_strided(self.shape, self.stride, parameter.storage_offset() + self.offset)

    def rows_of(self, rows: torch.Tensor, first_row: int, width: int) -> tuple[slice, torch.Tensor] | None:
        """Return a shard's part of the weight: rows of the weight, and the view of the shard that holds them.

        The shard is consecutive ``rows`` of the parameter, contiguous, from number ``first_row`` on; each has
        ``width`` numbers.
        """
        start, inside = divmod(self.offset, width)
        has_rows = self._has_rows(width)
        stop = start + (self.shape[0] if has_rows else 1)
        shard_stop = first_row + (len(rows) if rows.dim() else 1)
        low = max(start, first_row)
        high = min(stop, shard_stop)
        if low >= high:
            return None
        offset = rows.storage_offset() + (low - first_row) * width + inside
        if not has_rows:
            return slice(None), rows.as_strided(self.shape, self.stride, offset)
        shape = (high - low, *self.shape[1:])
        return slice(low - start, high - start), rows.as_strided(shape, self.stride, offset)

    def is_of_rows(self, width: int) -> bool:
        """Return whether it is the same part of consecutive rows, or a part of one row."""
        row_axes = 1 if self._has_rows(width) else 0
        position = self.offset % width  # becomes the place in the row of its last number
        for size, step in zip(self.shape[row_axes:], self.stride[row_axes:], strict=True):
            position += (size - 1) * step
        return position < width

    def _has_rows(self, width: int) -> bool:
        """Return whether its rows are rows of the parameter."""
        return bool(self.stride) and self.stride[0] == width


WeightViews = Mapping[str, list[WeightView]]  # views by the parameter's name


def views_of(model: Any, stored: Iterable[str]) -> WeightViews:
    """Return the views of every parameter and persistent buffer; a tied one has some per name.

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
    views: dict[str, list[WeightView]] = {name: [] for name in state}
    for name, tensor in saved.items():
        view = WeightView(name, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None or not view.is_of_rows(math.prod(state[owner].shape[1:])):
            raise ValueError(
                f"{model.config.model_type}: the checkpoint's {name} is not a part of the rows of one "
                f"parameter in transformers; models of this type can't be trained or served"
            )
        views[owner].append(view)
    return views


def as_stored(tensors: Iterable[Named], views: WeightViews) -> Iterator[Named]:
    """Yield full parameters and buffers as the checkpoint's weights: views, under its names."""
    for name, parameter in tensors:
        for view in views[name]:
            yield view.name, view.in_parameter(parameter)


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
    """Leaves tensors as they lie, so that weights cut from one stay views of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer", "")
