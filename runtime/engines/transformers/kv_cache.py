"""Keys and values of running samples, in preallocated slots that are written in place.

A layer's buffers are ``[rows, kv_heads, max_length, head_dim]``; row s is slot s. A row's tokens start at
column 0 and the row is as long as its sample, so a new sample can enter a free slot at any time, and live
slots are kept dense:

    slot 0  k k k k . .        slot 1 ends:  slot 0  k k k k . .
    slot 1  k k k . . .        the last      slot 1  k k k k k .   (was slot 2)
    slot 2  k k k k k .        moves in      live = 2
    live = 3, width = 5

Covers full and sliding-window attention; a sliding layer keeps all its keys, and its mask hides the old ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Prefill:
    """Write whole prompts ``[prompts, kv_heads, length, head_dim]``, each to every slot of its samples."""

    start: int  # the first slot to write
    source: Tensor  # int64 [slots written]: which prompt each slot gets

    past = 0

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Fill the slots; the prompts attend to themselves alone."""
        buffer[self.start : self.start + len(self.source), :, : new.shape[2]] = new[self.source]
        return new


@dataclass(frozen=True)
class Decode:
    """Write one token ``[live, kv_heads, 1, head_dim]`` to each live slot, at the slot's own position."""

    slots: Tensor  # int64 [live], 0, 1, ...
    positions: Tensor  # int64 [live]
    width: int  # the longest live row, the new token included
    aligned: bool  # whether every row is that long

    @property
    def past(self) -> int:
        """Return the columns before the new one."""
        return self.width - 1

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write, and return the live rows as a view ``[live, kv_heads, width, head_dim]``."""
        live = buffer[: len(self.slots), :, : self.width]
        if self.aligned:
            live[:, :, -1:] = new
        else:
            live[self.slots, :, self.positions] = new[:, :, 0]
        return live


class SlotLayer(CacheLayerMixin):
    """One layer's slots; buffers are made at the first write, when their heads and dtype are known."""

    def __init__(self, rows: int, max_length: int, sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers gives it no types
        self.rows = rows
        self.max_length = max_length
        self.is_sliding = sliding
        self.target: Prefill | Decode | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate ``[rows, kv_heads, max_length, head_dim]`` for keys and for values.

        Zeros, for a masked column has weight 0, and 0 times whatever memory held may be NaN.
        """
        for name, new in (("keys", key_states), ("values", value_states)):
            setattr(self, name, new.new_zeros(self.rows, new.shape[1], self.max_length, new.shape[3]))
        self.is_initialized = True

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[rows, kv_heads, max_length, head_dim]``, once they are allocated."""
        assert self.keys is not None, "allocated by the first write"
        assert self.values is not None, "allocated by the first write"
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write where ``target`` says; return the keys and values to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.target is not None
        keys, values = self.buffers
        return self.target.write(keys, key_states), self.target.write(values, value_states)

    def take(self, other: SlotLayer, slots: Tensor, width: int) -> None:
        """Begin with the first ``width`` columns of another's ``slots [k]``; it is given up."""
        keys, values = other.buffers
        self.lazy_initialization(keys, values)
        for target, source in zip(self.buffers, (keys, values), strict=True):
            target[: len(slots), :, :width] = source[slots, :, :width]
        del other.keys, other.values

    def get_seq_length(self) -> int:
        """Return the columns before those now being written."""
        return self.target.past if self.target else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns to attend to, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return the columns that a slot holds."""
        return self.max_length


class SlotCache(Cache):
    """The slots of all layers; ``sliding`` says which layers have a sliding window."""

    def __init__(self, rows: int, max_length: int, sliding: list[bool]) -> None:
        self.slot_layers = [SlotLayer(rows, max_length, slides) for slides in sliding]
        super().__init__(layers=[*self.slot_layers])

    def aim(self, target: Prefill | Decode) -> SlotCache:
        """Set where the next forward writes."""
        for layer in self.slot_layers:
            layer.target = target
        return self

    def take(self, other: SlotCache, slots: Tensor, width: int) -> None:
        """Begin with slots of another cache, which is given up, layer by layer."""
        for layer, source in zip(self.slot_layers, other.slot_layers, strict=True):
            layer.take(source, slots, width)

    def move(self, to: Tensor, source: Tensor, width: int) -> None:
        """Copy the first ``width`` columns of slots ``source [k]`` over slots ``to [k]``."""
        for layer in self.slot_layers:
            for buffer in layer.buffers:
                buffer[to, :, :width] = buffer[source, :, :width]
