"""Ragged (jagged) columns: one flat tensor of values and the offsets where rows begin.

Shapes in this project are written ``[samples, tokens]`` for a ragged column; its flat storage is
``values [all tokens]`` and ``offsets [samples + 1]``. A column with fixed axes has them behind:
``[samples, tokens, k]`` is ``values [all tokens, k]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlgraph.nodes.support.lazy import torch
from rlgraph.records import dataclass


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, without padding.

    Example:
        >>> Ragged.of([[1, 2], [], [3]]).lengths.tolist()
        [2, 0, 1]
    """

    values: torch.Tensor  # [all tokens]
    offsets: torch.Tensor  # int64 [rows + 1], offsets[0] = 0

    @staticmethod
    def of(rows: Sequence[Sequence[float]], dtype: torch.dtype | None = None) -> Ragged:
        """Build from lists of numbers; the dtype is torch's choice unless given (int64 without numbers)."""
        flat: list[float] = []
        for row in rows:
            flat += row
        if dtype is None and not flat:
            dtype = torch.int64
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return Ragged(torch.tensor(flat, dtype=dtype), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> torch.Tensor:
        """Return int64 ``[rows]``."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def row_of(self) -> torch.Tensor:
        """Return int64 ``[all tokens]``: the row that each value belongs to."""
        rows = torch.arange(len(self), device=self.offsets.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=len(self.values))

    @property
    def place_of(self) -> torch.Tensor:
        """Return int64 ``[all tokens]``: each value's index in its row, from 0."""
        return torch.arange(len(self.values), device=self.offsets.device) - self.offsets[self.row_of]

    def like(self, values: torch.Tensor) -> Ragged:
        """Return the same rows with other values ``[all tokens]``."""
        assert values.shape[0] == self.values.shape[0], "values do not fit the rows"
        return Ragged(values, self.offsets)

    def spread(self, per_row: torch.Tensor) -> Ragged:
        """Repeat a number per row ``[rows]`` over the row's tokens."""
        return self.like(torch.repeat_interleave(per_row, self.lengths, dim=0, output_size=len(self.values)))

    def where_true(self, per_row: torch.Tensor) -> Ragged:
        """Return a mask's tokens in float32: where it is true a number per row ``[rows]``, elsewhere 0."""
        return self.like(torch.where(self.values, self.spread(per_row).values, 0).float())

    def sum(self) -> torch.Tensor:
        """Return each row's sum ``[rows]``, 0 for an empty row."""
        values = self.values
        if values.dtype == torch.bool:
            values = values.to(torch.int64)
        return values.new_zeros(len(self), *values.shape[1:]).index_add(0, self.row_of, values)

    def so_far(self) -> torch.Tensor:
        """Return the sum of each value's row up to and with it ``[all tokens]``."""
        return self.spread(self.sum()).values - self.discounted(1.0) + self.values

    def discounted(self, factor: float) -> torch.Tensor:
        """Return the sum of factor^(k - t) x_k over k >= t, the rest of each value's row ``[all tokens]``.

        Each pass doubles how far a sum reaches, and nothing is padded:

            x_t    x_t + f x_{t+1}    (x_t + f x_{t+1}) + f^2 (x_{t+2} + f x_{t+3})    ...
        """
        sums = self.values
        reach = 1
        longest = max(self.lengths.tolist(), default=0)
        remaining = self.spread(self.lengths).values - self.place_of
        while reach < longest:
            sums = sums + factor**reach * torch.where(remaining > reach, sums.roll(-reach), 0)
            reach *= 2
        return sums

    def take_where(self, mask: torch.Tensor) -> Ragged:
        """Return the rows with only their values in a mask, bool ``[all tokens]``."""
        return Ragged(self.values[mask], offsets_of(self.like(mask).sum()))

    def compact(self, mask: Ragged) -> Ragged:
        """Return the rows with only their values in a mask, in float64."""
        masked = self.take_where(mask.values)
        return masked.like(masked.values.double())

    def take(self, rows: torch.Tensor) -> Ragged:
        """Return the rows with these indices ``[k]``, in this order."""
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        start = torch.repeat_interleave(self.offsets[rows] - offsets[:-1], lengths)
        return Ragged(self.values[start + torch.arange(len(start), device=start.device)], offsets)

    def padded(self, fill: float = 0) -> torch.Tensor:
        """Return ``[rows, longest, ...]``, padded on the right."""
        width = int(self.lengths.max()) if len(self) else 0
        shape = (len(self), width, *self.values.shape[1:])
        out = torch.full(shape, fill, dtype=self.values.dtype, device=self.values.device)
        out[self.mask()] = self.values
        return out

    def mask(self) -> torch.Tensor:
        """Return bool ``[rows, longest]``: true where ``padded`` holds a value."""
        width = int(self.lengths.max()) if len(self) else 0
        return torch.arange(width, device=self.offsets.device) < self.lengths[:, None]

    def to(self, device: torch.device | str) -> Ragged:
        """Return the same rows on another device."""
        return Ragged(self.values.to(device), self.offsets.to(device))

    def tolist(self) -> list[list[Any]]:
        """Return the rows as lists of numbers: int, float or bool, as ``torch.Tensor.tolist`` does."""
        return [self[row].tolist() for row in range(len(self))]


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return int64 ``[rows + 1]`` from lengths ``[rows]``."""
    return torch.cat([torch.zeros(1, dtype=torch.int64, device=lengths.device), lengths.cumsum(0)])


def joined(columns: Sequence[Any]) -> Any:
    """Return the rows of all columns as one; a column without rows need not say of what type they are."""
    with_rows = [column for column in columns if len(column)]
    if not with_rows:
        with_rows = [columns[0]]
    if isinstance(with_rows[0], Ragged):
        values = torch.cat([column.values for column in with_rows])
        lengths = torch.cat([column.lengths for column in with_rows])
        return Ragged(values, offsets_of(lengths))
    if isinstance(with_rows[0], torch.Tensor):
        return torch.cat(with_rows)
    rows: list[Any] = []
    for column in with_rows:
        rows += column
    return rows


def taken(column: Any, rows: torch.Tensor) -> Any:
    """Return the rows with these indices ``[k]`` of a ``Ragged``, a tensor ``[rows, ...]`` or a list."""
    if isinstance(column, Ragged):
        return column.take(rows)
    if isinstance(column, torch.Tensor):
        return column[rows]
    return [column[row] for row in rows.tolist()]


def same(column: Ragged | None, expected: Ragged | None) -> bool:
    """Return whether two columns are on one device and hold the same, or neither is there."""
    if column is None or expected is None:
        return column is expected
    if column.values.device != expected.values.device:
        return False
    return column.offsets.equal(expected.offsets) and column.values.equal(expected.values)


def behind_the_end(tokens: Ragged) -> tuple[Ragged, Ragged]:
    """Return rows with one more token each, and a loss mask that is true on it alone.

    An engine's value of a token is what the model says before it reads that token. So that of one behind the
    end, which may be any, is what it says of the whole row.
    """
    offsets = offsets_of(tokens.lengths + 1)
    end_mask = torch.zeros(int(offsets[-1]), dtype=torch.bool, device=tokens.values.device)
    end_mask[offsets[1:] - 1] = True
    ids = torch.zeros(len(end_mask), dtype=torch.int64, device=tokens.values.device)
    ids[~end_mask] = tokens.values
    return Ragged(ids, offsets), Ragged(end_mask, offsets)
