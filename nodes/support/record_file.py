"""Files of recorded columns: one folder per iteration, with one Parquet file per domain.

    runs/grpo/recorded/step-000011/prompts.parquet    a row per prompt: prompt, answer, ...
                                   samples.parquet    a row per sample: tokens, rewards, old_logprobs, ...

A column with a token axis is a column of lists, and a fixed axis is one of lists of fixed size in it. JSON is
text. What a file holds stands in its metadata: the domain, what that was made of, and the type of each column
as the plan writes it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.nodes.support.lazy import numpy, parquet, pyarrow

FOLDER = "recorded"
KEY = b"rlgraph"


class RecordError(RunError):
    """Recorded columns are missing, or not of the expected kind."""


@dataclass(frozen=True)
class RecordMetadata:
    """The metadata of a file: ``times`` rows for each of ``parent``'s, and columns with their types."""

    domain: str
    parent: str | None
    times: int
    types: Mapping[str, str]


@dataclass(frozen=True)
class Recorded:
    """A column as it was recorded: ``values [rows]``, or ``[all tokens]`` with ``offsets [rows + 1]``.

    Behind rows or tokens are its fixed axes.
    """

    values: Any  # numpy array, list[str], or a list of values of JSON
    offsets: Any = None


def file_of(domain: str) -> str:
    """Return the name of a domain's file.

    Example:
        >>> file_of("samples/informative"), file_of("samples:greedy")
        ('samples.informative.parquet', 'samples-greedy.parquet')
    """
    return f"{domain.replace('/', '.').replace(':', '-')}.parquet"


def steps_of(run: Path) -> dict[int, Path]:
    """Return iteration -> the folder of its columns, for the iterations that a run recorded."""
    folders = sorted((run / FOLDER).glob("step-*"))
    return {int(path.name.removeprefix("step-")): path for path in folders}


def step_folder(run: Path, iteration: int) -> Path:
    """Return the folder for the columns of an iteration."""
    return run / FOLDER / f"step-{iteration:06d}"


def write(path: Path, about: RecordMetadata, columns: Mapping[str, Any]) -> None:
    """Write the columns of one domain, each with ``values`` and ``offsets`` as of ``Recorded``."""
    table = pyarrow.table({name: _array(column, about.types[name]) for name, column in columns.items()})
    table = table.replace_schema_metadata({KEY: json.dumps(asdict(about))})
    parquet.write_table(table, path, compression="zstd")


def about(path: Path) -> RecordMetadata:
    """Read the metadata of a file.

    Raises:
        RecordError: it was not written by ``write``.
    """
    metadata = (parquet.read_schema(path).metadata or {}).get(KEY)
    if metadata is None:
        raise RecordError(f"{path} was not recorded by a run\n  schedule.record_every makes such files")
    return RecordMetadata(**json.loads(metadata))


def read(path: Path, names: Sequence[str]) -> dict[str, Recorded]:
    """Read some columns of a file."""
    table = parquet.read_table(path, columns=list(names))
    types = about(path).types
    columns = {}
    for name in names:
        column = _column(table.column(name).combine_chunks())
        if types[name].startswith("json"):
            column = Recorded([json.loads(text) for text in column.values])
        columns[name] = column
    return columns


def _array(column: Any, kind: str) -> Any:
    if kind.startswith("json"):
        return pyarrow.array([*map(json.dumps, column.values)], pyarrow.string())
    if isinstance(column.values, list):
        values = pyarrow.array(column.values)
    else:
        values = pyarrow.array(column.values.reshape(-1))
    for size in reversed(numpy.shape(column.values)[1:]):
        values = pyarrow.FixedSizeListArray.from_arrays(values, size)
    if column.offsets is None:
        return values
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(column.offsets), values)


def _column(array: Any) -> Recorded:
    if pyarrow.types.is_string(array.type):
        return Recorded(array.to_pylist())
    if not pyarrow.types.is_large_list(array.type):
        return Recorded(_values(array))
    offsets = array.offsets.to_numpy()
    values = _values(array.values)[offsets[0] : offsets[-1]]
    return Recorded(values, (offsets - offsets[0]).astype(numpy.int64))


def _values(array: Any) -> Any:
    """Return numbers, lists of fixed size taken apart, as an array ``[rows or tokens, *fixed]``."""
    shape = [len(array)]
    while pyarrow.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False).reshape(shape)
