"""A chunk of a column: the rows that one worker made.

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
class Chunk:
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

    def near(self) -> Chunk:
        """Return the same rows on the host."""
        if isinstance(self.values, torch.Tensor):
            return Chunk(self.values.cpu().numpy(), self.offsets)
        return self


LONG_ROW = 256  # tokens per row, on average, from which copying row by row is faster than numpy's indexing
DTYPES = {"float32": torch.float32, "int64": torch.int64, "boolean": torch.bool}
DTYPES |= {name: getattr(torch, name) for name in NARROW}


def pack(value: Any) -> Chunk:
    """Return a value as a ``Chunk``: a flat tensor, a ``Ragged``, or a list."""
    if isinstance(value, list):
        return Chunk(value)
    if isinstance(value, Ragged):
        return Chunk(_near(value.values), value.offsets.cpu().numpy())
    return Chunk(_near(value))


def _near(tensor: torch.Tensor) -> Any:
    """Return a tensor as a numpy array that shares its memory if it is on the host, else the tensor."""
    values = tensor.detach().contiguous()
    return values.numpy() if values.device.type == "cpu" else values


def empty(column: ColumnPlan) -> Chunk:
    """Return a chunk of a planned column that has no rows."""
    if column.type.dtype in LISTED:
        return Chunk([])
    values = torch.empty(0, *column.sizes, dtype=DTYPES[column.stored or column.type.dtype]).numpy()
    return Chunk(values, np.zeros(1, np.int64) if column.type.axis else None)


def unpack(chunk: Chunk) -> Any:
    """Return a ``Chunk`` as an op's body sees it: a tensor, a ``Ragged``, or a list.

    Values stay where they are, and offsets on the host: a train engine plans its micro-batches there.
    """
    if isinstance(chunk.values, list):
        return chunk.values
    values = chunk.values
    if not isinstance(values, torch.Tensor):
        values = _tensor(values)
    if chunk.offsets is None:
        return values
    return Ragged(values, _tensor(chunk.offsets))


def _tensor(array: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        # the store's memory is read-only; torch has no such tensors, and ops do not write what they read
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def gather(chunks: Sequence[Chunk], rows: Any) -> Chunk:
    """Return the rows with these indices, in this order; they count through all chunks in turn."""
    if _has_long_rows(chunks):
        return _copied([chunk.near() for chunk in chunks], np.asarray(rows, np.int64))
    chunk = chunks[0] if len(chunks) == 1 else concat(chunks)
    if isinstance(chunk.values, list):
        return Chunk([chunk.values[row] for row in rows])
    if chunk.offsets is None:
        return Chunk(chunk.values[rows])
    lengths = chunk.lengths[rows]
    offsets = _offsets(lengths)
    start = np.repeat(chunk.offsets[rows] - offsets[:-1], lengths)
    return Chunk(chunk.values[start + np.arange(len(start))], offsets)


def gathered(picks: Sequence[Any], counts: Sequence[int], chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return one chunk for each column, gathered from several, by the arguments of ``Worker.repartition``.

    The first column takes the first ``counts[0]`` of the ``chunks``, and of these the rows ``picks[0]``.
    """
    remaining = iter(chunks)
    return [gather([*islice(remaining, count)], rows) for rows, count in zip(picks, counts, strict=True)]


def _has_long_rows(chunks: Sequence[Chunk]) -> bool:
    if chunks[0].offsets is None:
        return False
    tokens = sum(len(chunk.values) for chunk in chunks)
    rows = sum(len(chunk) for chunk in chunks)
    return tokens > LONG_ROW * rows


def _copied(chunks: Sequence[Chunk], rows: Any) -> Chunk:
    """Gather row by row: each byte is copied once, and no index is made for each token."""
    first_rows = np.cumsum([0, *map(len, chunks)])
    owners = np.searchsorted(first_rows, rows, side="right") - 1
    starts = np.concatenate([chunk.offsets[:-1] for chunk in chunks])[rows]
    lengths = np.concatenate([chunk.lengths for chunk in chunks])[rows]
    offsets = _offsets(lengths)
    spans = np.stack([starts, starts + lengths, offsets[:-1]], 1)
    values = np.empty((offsets[-1], *chunks[0].values.shape[1:]), chunks[0].values.dtype)

    def copy(span_rows: Any) -> None:
        for owner, (start, end, target) in zip(
            owners[span_rows].tolist(), spans[span_rows].tolist(), strict=True
        ):
            values[target : target + end - start] = chunks[owner].values[start:end]

    row_spans = np.array_split(np.arange(len(rows)), CORES)
    for _ in COPIERS.map(copy, row_spans):  # raises what a copier raised
        pass
    return Chunk(values, offsets)


def row_lengths(chunks: Sequence[Chunk]) -> Any:
    """Return int64 ``[rows]``: tokens of each row of columns of one domain; 1 where none has a token axis."""
    for chunk in chunks:
        if chunk.offsets is not None:
            return chunk.lengths
    return chunks[0].lengths


def save(path: str, chunks: Sequence[Chunk]) -> None:
    """Write chunks to an ``.npz`` file; lists are written as JSON."""
    arrays: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        if isinstance(chunk.values, list):
            arrays[f"{number}.text"] = np.frombuffer(json.dumps(chunk.values).encode(), np.uint8)
        else:
            arrays[f"{number}.values"] = chunk.values
        if chunk.offsets is not None:
            arrays[f"{number}.offsets"] = chunk.offsets
    np.savez(path, **arrays)


def load(path: str) -> list[Chunk]:
    """Return the chunks that ``save`` wrote, bit for bit."""
    with np.load(path, allow_pickle=False) as file:
        count = len({name.partition(".")[0] for name in file.files})
        return [_loaded(file, number) for number in range(count)]


def _loaded(file: Any, number: int) -> Chunk:
    if f"{number}.text" in file:
        return Chunk(json.loads(file[f"{number}.text"].tobytes()))
    return Chunk(file[f"{number}.values"], file.get(f"{number}.offsets"))


def concat(chunks: Sequence[Chunk]) -> Chunk:
    """Return the rows of several chunks, one after the other."""
    if isinstance(chunks[0].values, list):
        return Chunk([value for chunk in chunks for value in chunk.values])
    values = np.concatenate([chunk.near().values for chunk in chunks])
    if chunks[0].offsets is None:
        return Chunk(values)
    return Chunk(values, _offsets(np.concatenate([chunk.lengths for chunk in chunks])))


def _offsets(lengths: Any) -> Any:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
