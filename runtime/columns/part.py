"""The rows of a column that one worker made.

Numbers leave their worker as numpy arrays, which a reader maps without a copy; text is a list of str, json a
list of JSON values. Values on a device other than the host stay there until another worker reads them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from rlgraph.ir.plan import ColumnPlan
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops.column_types import LISTED, NARROW
from rlgraph.runtime.columns.shared_memory import COPIERS, CORES


@dataclass(frozen=True)
class Part:
    """Rows of a column: ``values [rows]`` or ``[all tokens]`` with ``offsets [rows + 1]``, or a list.

    Behind rows or tokens are the column's fixed axes, if it has any: ``[all tokens, layers, k]``.
    """

    values: Any  # numpy array, a tensor that is not on the host, or list[str], or a list of values of JSON
    offsets: Any = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def lengths(self) -> Any:
        """Return int64 ``[rows]``: tokens of each row; 1 where there is no token axis."""
        return np.ones(len(self), np.int64) if self.offsets is None else np.diff(self.offsets)

    def near(self) -> Part:
        """Return the same rows on the host."""
        if isinstance(self.values, torch.Tensor):
            return Part(self.values.cpu().numpy(), self.offsets)
        return self


LONG_ROW = 256  # tokens per row, on average, from which copying row by row is faster than numpy's indexing
DTYPES = {"float32": torch.float32, "int64": torch.int64, "boolean": torch.bool}
DTYPES |= {name: getattr(torch, name) for name in NARROW}


def pack(value: Any) -> Part:
    """Return a value as a ``Part``: a flat tensor, a ``Ragged``, or a list."""
    if isinstance(value, list):
        return Part(value)
    if isinstance(value, Ragged):
        return Part(_near(value.values), value.offsets.cpu().numpy())
    return Part(_near(value))


def _near(tensor: torch.Tensor) -> Any:
    """Return a tensor as a numpy array that shares its memory if it is on the host, else the tensor."""
    values = tensor.detach().contiguous()
    return values.numpy() if values.device.type == "cpu" else values


def empty(column: ColumnPlan) -> Part:
    """Return a part of a planned column that has no rows."""
    if column.type.dtype in LISTED:
        return Part([])
    values = torch.empty(0, *column.sizes, dtype=DTYPES[column.stored or column.type.dtype]).numpy()
    return Part(values, np.zeros(1, np.int64) if column.type.axis else None)


def unpack(part: Part) -> Any:
    """Return a ``Part`` as an op's body sees it: a tensor, a ``Ragged``, or a list.

    Values stay where they are, and offsets on the host: a train engine plans its micro-batches there.
    """
    if isinstance(part.values, list):
        return part.values
    values = part.values if isinstance(part.values, torch.Tensor) else _tensor(part.values)
    if part.offsets is None:
        return values
    return Ragged(values, _tensor(part.offsets))


def _tensor(array: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        # the store's memory is read-only; torch has no such tensors, and ops do not write what they read
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def gather(parts: Sequence[Part], rows: Any) -> Part:
    """Return the rows with these indices, in this order; they count through all parts in turn."""
    if _has_long_rows(parts):
        return _copied([part.near() for part in parts], np.asarray(rows, np.int64))
    part = parts[0] if len(parts) == 1 else concat(parts)
    if isinstance(part.values, list):
        return Part([part.values[row] for row in rows])
    if part.offsets is None:
        return Part(part.values[rows])
    lengths = part.lengths[rows]
    offsets = _offsets(lengths)
    start = np.repeat(part.offsets[rows] - offsets[:-1], lengths)
    return Part(part.values[start + np.arange(len(start))], offsets)


def gathered(picks: Sequence[Any], counts: Sequence[int], parts: Sequence[Part]) -> list[Part]:
    """Return one part for each column, gathered from several, by the arguments of ``Worker.repartition``.

    The first column takes the first ``counts[0]`` of the ``parts``, and of these the rows ``picks[0]``.
    """
    remaining = iter(parts)
    return [gather([*islice(remaining, count)], rows) for rows, count in zip(picks, counts, strict=True)]


def _has_long_rows(parts: Sequence[Part]) -> bool:
    if parts[0].offsets is None:
        return False
    tokens = sum(len(part.values) for part in parts)
    rows = sum(len(part) for part in parts)
    return tokens > LONG_ROW * rows


def _copied(parts: Sequence[Part], rows: Any) -> Part:
    """Gather row by row: each byte is copied once, and no index is made for each token."""
    first_rows = np.cumsum([0, *map(len, parts)])
    owners = np.searchsorted(first_rows, rows, side="right") - 1
    starts = np.concatenate([part.offsets[:-1] for part in parts])[rows]
    lengths = np.concatenate([part.lengths for part in parts])[rows]
    offsets = _offsets(lengths)
    spans = np.stack([starts, starts + lengths, offsets[:-1]], 1)
    values = np.empty((offsets[-1], *parts[0].values.shape[1:]), parts[0].values.dtype)

    def copy(chunk: Any) -> None:
        for owner, (start, end, target) in zip(owners[chunk].tolist(), spans[chunk].tolist(), strict=True):
            values[target : target + end - start] = parts[owner].values[start:end]

    chunks = np.array_split(np.arange(len(rows)), CORES)
    for _ in COPIERS.map(copy, chunks):  # raises what a copier raised
        pass
    return Part(values, offsets)


def save(path: str, parts: Sequence[Part]) -> None:
    """Write parts to an ``.npz`` file; lists are written as JSON."""
    arrays: dict[str, Any] = {}
    for number, part in enumerate(parts):
        if isinstance(part.values, list):
            arrays[f"{number}.text"] = np.frombuffer(json.dumps(part.values).encode(), np.uint8)
        else:
            arrays[f"{number}.values"] = part.values
        if part.offsets is not None:
            arrays[f"{number}.offsets"] = part.offsets
    np.savez(path, **arrays)


def load(path: str) -> list[Part]:
    """Return the parts that ``save`` wrote, bit for bit."""
    with np.load(path, allow_pickle=False) as file:
        count = len({name.partition(".")[0] for name in file.files})
        return [_loaded(file, number) for number in range(count)]


def _loaded(file: Any, number: int) -> Part:
    if f"{number}.text" in file:
        return Part(json.loads(file[f"{number}.text"].tobytes()))
    return Part(file[f"{number}.values"], file.get(f"{number}.offsets"))


def concat(parts: Sequence[Part]) -> Part:
    """Return the rows of several parts, one after the other."""
    if isinstance(parts[0].values, list):
        return Part([value for part in parts for value in part.values])
    values = np.concatenate([part.near().values for part in parts])
    if parts[0].offsets is None:
        return Part(values)
    return Part(values, _offsets(np.concatenate([part.lengths for part in parts])))


def _offsets(lengths: Any) -> Any:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
