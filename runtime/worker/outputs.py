"""Checks the columns that an op returned before anything reads them: form, rows, tokens, finite numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlgraph.errors import RunError
from rlgraph.ir.plan import ColumnPlan
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.row_field import is_json
from rlgraph.ops.column_types import LISTED
from rlgraph.runtime.columns.part import DTYPES, Part, pack

REMEDY = "return one value per row that the op reads, in their order; of a source, as many as it is asked for"
FORMS = {"text": "a list of str", "json": "a list of values of JSON"}  # of what is no tensor
FINITE = "mend the op, or go on with what it gives: schedule.on_nan=skip"


class ColumnError(RunError):
    """An op returned something else than the column that it declares; the message names the op."""


@dataclass(frozen=True)
class Wanted:
    """A column as its op has to return it.

    Attributes:
        op: the node and its op, for errors.
        column: its name.
        plan: its type, and the sizes of its fixed axes.
        rows: how many it has on this worker; None: any number.
        lengths: int64 ``[rows]``, the tokens of each; None: any number.
        finite: whether floats that are not finite are an error.
        numbers: of its rows in the whole batch, where they are known.
    """

    op: str
    column: str
    plan: ColumnPlan
    rows: int | None
    lengths: Any
    finite: bool
    numbers: Sequence[int] = ()

    def __str__(self) -> str:
        kind, dtype = self.plan.type, self.plan.stored or self.plan.type.dtype
        form = FORMS.get(dtype, f"a tensor of {dtype}")
        if kind.axis:
            form = f"a Ragged of {dtype}"
        if self.plan.sizes:
            form += f", each value {list(self.plan.sizes)}"
        rows = "rows" if self.rows is None else f"{self.rows} rows"
        return f"{kind}: {form}, {rows}"

    def packed(self, value: Any) -> Part:
        """Return a value as a part.

        Raises:
            ColumnError: it is not what is wanted.
        """
        if not _is_of(self.plan, value):
            raise self._error(_description(value))
        part = pack(value)
        if self.rows is not None and len(part) != self.rows:
            raise self._error(f"{_description(value)} with {len(part)} rows")
        if self.lengths is not None and not np.array_equal(part.lengths, self.lengths):
            row = int(np.flatnonzero(part.lengths != self.lengths)[0])
            tokens = f"{part.lengths[row]} tokens in row {row}, which has {self.lengths[row]}"
            raise self._error(f"{_description(value)} with {tokens}")
        if self.finite and self.plan.type.dtype == "float32":
            self._check_finite(part)
        return part

    def _check_finite(self, part: Part) -> None:
        values = torch.as_tensor(part.values)
        finite = values.isfinite()
        if finite.all():
            return
        places = (~finite).nonzero()[:, 0].tolist()
        first_row = places[0]
        if part.offsets is not None:  # the place of a token
            first_row = np.searchsorted(part.offsets, places[0], "right") - 1
        number = values[~finite][0].item()
        row = self.numbers[first_row] if len(self.numbers) else first_row
        law = f"{self.op}: column `{self.column}` holds {number} in row {row}"
        raise ColumnError(f"{law}; {len(places)} of {values.numel()} values are not finite\n  {FINITE}")

    def _error(self, came: str) -> ColumnError:
        return ColumnError(f"{self.op} returned {came} as column `{self.column}`; wanted {self}\n  {REMEDY}")


def together(op: str, columns: Sequence[str], parts: Sequence[Part]) -> None:
    """Check that all columns of an op have as many rows.

    Raises:
        ColumnError: they have not.
    """
    if len({len(part) for part in parts}) > 1:
        counts = ", ".join(f"`{name}` {len(part)}" for name, part in zip(columns, parts, strict=True))
        raise ColumnError(f"{op} returned columns of different numbers of rows: {counts}\n  {REMEDY}")


def _is_of(column: ColumnPlan, value: Any) -> bool:
    kind, dtype = column.type, column.stored or column.type.dtype
    if dtype in LISTED:
        if not isinstance(value, list):
            return False
        if dtype == "json":
            return is_json(value)
        return all(isinstance(item, str) for item in value)
    if kind.axis is None:
        return _is_flat(value, dtype, column.sizes)
    if not isinstance(value, Ragged):
        return False
    return _is_flat(value.values, dtype, column.sizes) and _has_rows(value)


def _is_flat(value: Any, dtype: str, sizes: Sequence[int] = ()) -> bool:
    """Return whether a value is a tensor ``[any number, *sizes]``."""
    right = isinstance(value, torch.Tensor) and value.dtype == DTYPES[dtype]
    return right and value.dim() == 1 + len(sizes) and value.shape[1:] == tuple(sizes)


def _has_rows(value: Ragged) -> bool:
    """Return whether a ragged column's offsets cut its values into rows."""
    if not _is_flat(value.offsets, "int64") or not len(value.offsets):
        return False
    offsets = value.offsets.cpu()
    if offsets[0] != 0 or offsets[-1] != len(value.values):
        return False
    return bool((offsets.diff() >= 0).all())


def _description(value: Any) -> str:
    """Return a value in words: its class, and of a tensor its dtype and shape."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Ragged):
        return f"a Ragged of values {_description(value.values)} and offsets {_description(value.offsets)}"
    if isinstance(value, list):
        kinds = ", ".join(sorted({type(item).__name__ for item in value})) or "nothing"
        return f"a list of {len(value)} ({kinds})"
    return "None" if value is None else f"a {type(value).__name__}"
