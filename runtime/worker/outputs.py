"""Checks the columns that an op returned before anything reads them: form, rows, tokens, finite numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlgraph.errors import RunError, shortened
from rlgraph.ir.plan import ColumnPlan
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.row_field import LARGEST, as_number, is_json
from rlgraph.ops.column_types import LISTED
from rlgraph.runtime.columns.chunk import DTYPES, Chunk, pack

ROWS_REMEDY = (
    "return one value per row that the op reads, in their order; of a source, as many as it is asked for"
)
TOKENS_REMEDY = (
    "return a Ragged with the rows and tokens of a column that the op reads, as by COLUMN.like(values)"
)
# dtype -> what an element of a list may be, its largest size, and what errors call it
NUMBERS = {"float32": (int, float), "int64": (int,), "boolean": (bool,)}
MOST = {"float32": LARGEST, "int64": 2**63 - 1, "boolean": 1}
NAMES = {"float32": "number", "int64": "whole number", "boolean": "True or False"}
FORMS = {"text": "a list of str", "json": "a list of values of JSON"}  # of columns that are no tensors
FINITE = "correct the op, or go on with what it returns: schedule.on_nan=skip"


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
        column_type = self.plan.type
        dtype = self.plan.stored or column_type.dtype
        form = FORMS.get(dtype, f"a tensor of {dtype}")
        if column_type.axis:
            form = f"a Ragged of {dtype}"
        if self.plan.sizes:
            form += f", each value {list(self.plan.sizes)}"
        rows = "rows" if self.rows is None else f"{self.rows} rows"
        return f"{column_type}: {form}, {rows}"

    def packed(self, value: Any) -> Chunk:
        """Return a value in the form in which columns travel.

        Raises:
            ColumnError: it is not what is wanted.
        """
        description = _description(value)
        value = self._converted(value)
        if not _has_form(self.plan, value):
            raise self._error(description, _remedy(self.plan, value))
        packed = pack(value)
        if self.rows is not None and len(packed) != self.rows:
            raise self._error(f"{description} with {len(packed)} rows", ROWS_REMEDY)
        if self.lengths is not None and not np.array_equal(packed.lengths, self.lengths):
            row = int(np.flatnonzero(packed.lengths != self.lengths)[0])
            tokens = f"{packed.lengths[row]} tokens in row {row}, which has {self.lengths[row]}"
            raise self._error(f"{description} with {tokens}", TOKENS_REMEDY)
        if self.finite and self.plan.type.dtype == "float32":
            self._check_finite(packed)
        return packed

    def _check_finite(self, packed: Chunk) -> None:
        values = torch.as_tensor(packed.values)
        is_finite = values.isfinite()
        if is_finite.all():
            return
        places = (~is_finite).nonzero()[:, 0].tolist()
        row = places[0]
        if packed.offsets is not None:  # the place of a token
            row = np.searchsorted(packed.offsets, places[0], "right") - 1
        row_number = self._row_number(row)
        value = values[~is_finite][0].item()
        law = f"{self.op}: column `{self.column}` holds {value} in row {row_number}"
        raise ColumnError(f"{law}; {len(places)} of {values.numel()} values are not finite\n  {FINITE}")

    def _converted(self, value: Any) -> Any:
        """Return a list of numbers, an array, or a tensor of another dtype as the tensor that is wanted.

        Whole numbers and booleans become floats, and narrow integers int64; floats never become integers.
        What can't be converted so is returned as it is.

        Raises:
            ColumnError: an element of a list is not such a number; the message names its row.
        """
        dtype = self.plan.stored or self.plan.type.dtype
        if dtype not in NUMBERS:
            return value
        if isinstance(value, Ragged):
            return Ragged(_cast(value.values, dtype), value.offsets)
        has_one_number_per_row = self.plan.type.axis is None and not self.plan.sizes
        if has_one_number_per_row and isinstance(value, list | tuple):
            return self._tensor(value, dtype)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            value = torch.as_tensor(value)
        return _cast(value, dtype)

    def _tensor(self, values: Sequence[Any], dtype: str) -> torch.Tensor:
        """Return a list of numbers as a tensor ``[rows]``."""
        numbers = []
        for row, value in enumerate(values):
            number = as_number(value)
            is_number = isinstance(number, NUMBERS[dtype])
            fits = is_number and (number != number or abs(number) <= MOST[dtype] or abs(number) == np.inf)
            if not fits:
                returned = f"a list with {shortened(repr(value), 80)} in row {self._row_number(row)}"
                raise self._error(returned, f"return one {NAMES[dtype]} for each row")
            numbers.append(number)
        return torch.tensor(numbers, dtype=DTYPES[dtype])

    def _row_number(self, row: int) -> int:
        """Return the number in the whole batch of one of the rows, where it is known."""
        return self.numbers[row] if row < len(self.numbers) else row

    def _error(self, returned: str, remedy: str) -> ColumnError:
        law = f"{self.op} returned {returned} as column `{self.column}`; wanted {self}"
        return ColumnError(f"{law}\n  {remedy}")


def together(op: str, columns: Sequence[str], outputs: Sequence[Chunk]) -> None:
    """Check that all columns of an op have equally many rows.

    Raises:
        ColumnError: they have not.
    """
    counts = [len(output) for output in outputs]
    if len(set(counts)) > 1:
        rows = ", ".join(f"`{name}` {count}" for name, count in zip(columns, counts, strict=True))
        raise ColumnError(f"{op} returned columns of different numbers of rows: {rows}\n  {ROWS_REMEDY}")


def _has_form(column: ColumnPlan, value: Any) -> bool:
    """Return whether a value is a list, tensor or Ragged, as a column's type says."""
    dtype = column.stored or column.type.dtype
    if dtype in LISTED:
        if dtype == "json":
            return isinstance(value, list) and is_json(value)
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if column.type.axis is None:
        return _is_flat(value, dtype, column.sizes)
    if not isinstance(value, Ragged):
        return False
    return _is_flat(value.values, dtype, column.sizes) and _has_rows(value)


def _cast(value: Any, dtype: str) -> Any:
    """Return a tensor in a dtype that can hold its numbers; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return value
    is_integer = not value.is_floating_point() and value.dtype != torch.bool
    can_hold = dtype == "float32" or (dtype == "int64" and is_integer)
    return value.to(DTYPES[dtype]) if can_hold else value


def _remedy(column: ColumnPlan, value: Any) -> str:
    """Return how to mend a value that has not the form of its column."""
    dtype = column.stored or column.type.dtype
    if value is None:
        return "end the function with a return statement that gives the column, one value per row"
    if dtype in LISTED:
        return f"return {FORMS[dtype]}, one for each row"
    if column.type.axis:
        return TOKENS_REMEDY
    if not isinstance(value, torch.Tensor):
        return f"return a tensor of {dtype} or a list of numbers, one for each row"
    wanted_dim = 1 + len(column.sizes)
    if value.dim() != wanted_dim or value.shape[1:] != tuple(column.sizes):
        shape = ", ".join(["rows", *map(str, column.sizes)])
        return f"give it the shape [{shape}], as by squeeze, sum or reshape"
    return f"convert it, as value.to({DTYPES[dtype]})"


def _is_flat(value: Any, dtype: str, sizes: Sequence[int] = ()) -> bool:
    """Return whether a value is a tensor ``[any number, *sizes]``."""
    if not isinstance(value, torch.Tensor) or value.dtype != DTYPES[dtype]:
        return False
    return value.dim() == 1 + len(sizes) and value.shape[1:] == tuple(sizes)


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
        classes = ", ".join(sorted({type(item).__name__ for item in value})) or "nothing"
        return f"a list of {len(value)} ({classes})"
    if value is None:
        return "None"
    return f"a {type(value).__name__}"
