"""Files of recorded columns: for each iteration a folder, in it a Parquet file for each domain.

    runs/grpo/recorded/step-000011/prompts.parquet    a row a prompt: prompt, answer, ...
                                   samples.parquet    a row a sample: tokens, rewards, old_logprobs, ...

A column with a token axis is a column of lists. What a file holds stands in its metadata: the domain, what
that was made of, and the type of each column as the plan writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError

FOLDER = "recorded"
KEY = b"rlgraph"


class RecordError(RunError):
    """Recorded columns that are not there, or not what they are taken for."""


@dataclass(frozen=True)
class About:
    """What a file holds: ``times`` rows for each of ``parent``'s, and columns with their types."""

    domain: str
    parent: str | None
    times: int
    types: Mapping[str, str]


@dataclass(frozen=True)
class Recorded:
    """A column as it was recorded: ``values [rows]``, or ``[all tokens]`` with ``offsets [rows + 1]``."""

    values: Any  # numpy array or list[str]
    offsets: Any = None


def file_of(domain: str) -> str:
    """The name of a domain's file.

    Example:
        >>> file_of("samples/informative"), file_of("samples:greedy")
        ('samples.informative.parquet', 'samples-greedy.parquet')
    """
    return f"{domain.replace('/', '.').replace(':', '-')}.parquet"


def steps_of(run: Path) -> dict[int, Path]:
    """Iteration -> the folder of its columns, of the iterations that a run recorded."""
    found = sorted((run / FOLDER).glob("step-*"))
    return {int(path.name.removeprefix("step-")): path for path in found}


def step_folder(run: Path, iteration: int) -> Path:
    """Where the columns of an iteration are, or will be."""
    return run / FOLDER / f"step-{iteration:06d}"


def write(path: Path, about: About, columns: Mapping[str, Recorded]) -> None:
    """Write the columns of one domain."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: _array(column) for name, column in columns.items()})
    table = table.replace_schema_metadata({KEY: json.dumps(asdict(about))})
    pq.write_table(table, path, compression="zstd")


def about(path: Path) -> About:
    """What a file holds.

    Raises:
        RecordError: it was not written by ``write``.
    """
    import pyarrow.parquet as pq

    found = (pq.read_schema(path).metadata or {}).get(KEY)
    if found is None:
        raise RecordError(f"{path} was not recorded by a run\n  schedule.record_every makes such files")
    return About(**json.loads(found))


def read(path: Path, names: Sequence[str]) -> dict[str, Recorded]:
    """Some columns of a file."""
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=list(names))
    return {name: _column(table.column(name).combine_chunks()) for name in names}


def _array(column: Recorded) -> Any:
    import pyarrow as pa

    if column.offsets is None:
        return pa.array(column.values)
    return pa.LargeListArray.from_arrays(pa.array(column.offsets), pa.array(column.values))


def _column(array: Any) -> Recorded:
    import numpy as np
    import pyarrow as pa

    if pa.types.is_string(array.type):
        return Recorded(array.to_pylist())
    if not pa.types.is_large_list(array.type):
        return Recorded(array.to_numpy(zero_copy_only=False))
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    return Recorded(values, (offsets - offsets[0]).astype(np.int64))
