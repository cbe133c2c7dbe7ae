"""Data sets that data sources go through: rows of files, filtered and tokenised once, and kept as Arrow.

What comes of more than ``ON_DISK`` bytes of files is written to the cache on first use, and mapped from there
by every process on this host: none has it in memory. A cached set is known by the files' sizes and times of
change, the tokenizer's own contents and all that says how rows are read.
"""

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rlgraph.nodes.support.conversation import ReadingOptions
from rlgraph.nodes.support.data_file import DataError, matching, state_of
from rlgraph.nodes.support.lazy import numpy, pyarrow
from rlgraph.nodes.support.prepare import DataSetKey, SetKind, write_set
from rlgraph.nodes.support.row_tokens import Example
from rlgraph.nodes.support.text_rows import OPENERS
from rlgraph.ops import Tokenizer

SourceFiles = Sequence[str] | Mapping[str, Sequence[str]]
ON_DISK = 2**18  # bytes of files from which what comes of them is cached on disk


@dataclass(frozen=True)
class DataSet:
    """Rows of a source, from 0; of pairs there is a table for each side.

    Attributes:
        tables: Arrow tables of all rows that ``where`` keeps.
        files: the source and the name of each file.
        rows: int32 ``[rows]``, the rows of the tables that are not too long.
        lengths: int32 ``[rows]``, tokens that a model must have room for.
        filtered: rows that ``where`` leaves out.
        overlong: rows dropped or cut for their length.
        overlong_of: the same by source, of sources that have any.
        equal: pairs left out, as both of their rows are the same.
    """

    tables: tuple[Any, ...]
    files: Sequence[tuple[str, str]]
    rows: Any
    lengths: Any
    filtered: int = 0
    overlong: int = 0
    overlong_of: Mapping[str, int] = field(default_factory=dict)
    equal: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str, rows: Sequence[int] | None = None, side: int = 0) -> list[Any]:
        """Return a column of the table of some rows, or of all."""
        column = self.tables[side][name]
        table_rows = self.rows if rows is None else self.rows[list(rows)]
        cells = [column[row] for row in table_rows.tolist()]
        if pyarrow.types.is_large_list(column.type):  # by NumPy, as as_py is slow with long lists
            return [cell.values.to_numpy(zero_copy_only=False).tolist() for cell in cells]
        return [cell.as_py() for cell in cells]

    def examples(self, rows: Sequence[int], side: int = 0) -> list[Example]:
        """Return the token ids of some rows, and which of them are learnt."""
        return [*zip(self.column("ids", rows, side), self.column("learnt", rows, side), strict=True)]

    def more(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return what ``columns`` takes of some rows."""
        return [*map(json.loads, self.column("more", rows))]

    def place(self, row: int) -> str:
        """Return where a row stands: FILE:N."""
        (file_number,) = self.column("file", [row])
        (number,) = self.column("number", [row])
        _, file = self.files[file_number]
        return f"{file}:{number}"

    @functools.cached_property
    def by_source(self) -> dict[str, Any]:
        """Return source -> its rows, int32."""
        file_of_row = self.tables[0]["file"].to_numpy()[self.rows]
        files_of: dict[str, list[int]] = {}
        for number, (name, _) in enumerate(self.files):
            files_of.setdefault(name, []).append(number)
        rows_of = {}
        for name, numbers in files_of.items():
            rows = numpy.flatnonzero(numpy.isin(file_of_row, numbers))
            rows_of[name] = rows.astype(numpy.int32)
        return rows_of

    def empty(self, name: str) -> dict[str, int]:
        """Return source -> its rows whose text in a column is empty, of sources that have any."""
        from pyarrow import compute

        is_empty = compute.equal(self.tables[0][name], "").to_numpy()[self.rows]
        return self._counts_by_source(is_empty)

    def _counts_by_source(self, mask: Any) -> dict[str, int]:
        """Return source -> how many of its rows are true in a mask ``[rows]``, of sources that have any."""
        counts = {}
        for source, rows_of_source in self.by_source.items():
            count = int(mask[rows_of_source].sum())
            if count:
                counts[source] = count
        return counts

    def longest(self) -> tuple[str, int]:
        """Return the place of the longest row, and its tokens."""
        row = int(self.lengths.argmax())
        return self.place(row), int(self.lengths[row])

    def within(self, limit: int | None, attribute: str, truncate: str | None = None) -> Self:
        """Return the rows of at most ``limit`` tokens; with ``truncate`` all, to be cut where longer.

        Raises:
            DataError: a source has none, or longer ones are refused; ``attribute`` is what could be raised.
        """
        if limit is None:
            if truncate:
                raise DataError(f"truncate: {truncate} says nothing without a limit; give {attribute}")
            return self
        place, longest = self.longest()
        if truncate == "refuse" and longest > limit:
            law = f"{place}: {longest} tokens, more than {attribute} {limit}"
            raise DataError(f"{law}; raise it, shorten the row, or cut it by truncate: left, right or middle")
        fitting = self.lengths <= limit
        overlong = int((~fitting).sum())
        overlong_of = self._counts_by_source(~fitting)
        if truncate:
            cut = self.lengths.clip(max=limit)
            return replace(self, lengths=cut, overlong=overlong, overlong_of=overlong_of)
        for rows_of_source in self.by_source.values():
            if fitting[rows_of_source].any():
                continue
            file_numbers = dict.fromkeys(self.column("file", rows_of_source))
            files = dict.fromkeys(self.files[number][1] for number in file_numbers)
            shortest = self.lengths[rows_of_source].min()
            law = f"{', '.join(files)}: all {len(rows_of_source)} rows have over {limit} tokens"
            raise DataError(f"{law}, the shortest {shortest}; raise {attribute}")
        return replace(
            self,
            rows=self.rows[fitting],
            lengths=self.lengths[fitting],
            overlong=overlong,
            overlong_of=overlong_of,
        )


def load_prompts(
    tokenizer: Tokenizer,
    *,
    files: SourceFiles,
    max_prompt_tokens: int | None = None,
    truncate: str | None = None,
    **reading: Any,
) -> DataSet:
    """Load all prompts that ``data.prompts`` with these attributes goes through.

    ``files`` are those of one source, or of each by its name; ``reading`` are ``ReadingOptions``.

    Raises:
        DataError: a file that is missing, can't be read or lacks a column; a row without what it needs; or no
            row left.
    """
    data = _loaded(source_of("prompts", tokenizer, files, reading))
    return data.within(max_prompt_tokens, "max_prompt_tokens", truncate)


def load_examples(
    tokenizer: Tokenizer, *, files: SourceFiles, max_tokens: int | None = None, **reading: Any
) -> DataSet:
    """Load all examples that ``data.examples`` with these attributes goes through."""
    return _loaded(source_of("examples", tokenizer, files, reading)).within(max_tokens, "max_tokens")


def source_of(kind: SetKind, tokenizer: Any, files: SourceFiles, reading: Mapping[str, Any]) -> DataSetKey:
    """Return the key of these rows: the files as they are now, and how they are read.

    A list of files is one source, named after the first of them. A pattern is the files that it means now.
    """
    if isinstance(files, Mapping):
        patterns_of = files
    else:
        first_file = matching(files[0])[0]
        patterns_of = {_stem(first_file): files}
    named_files = []
    for name, patterns in patterns_of.items():
        for pattern in patterns:
            named_files += [(name, file) for file in matching(pattern)]
    options = ReadingOptions(**reading)
    return DataSetKey(
        kind=kind,
        files=tuple(named_files),
        states=tuple(state_of(file) for _, file in named_files),
        tokens=_contents(tokenizer),
        key=json.dumps(asdict(options), sort_keys=True),
        reading=options,
        tokenizer=tokenizer,
    )


def _stem(file: str) -> str:
    """Return the name of a file without its suffixes.

    Example:
        >>> _stem("data/a.jsonl.gz"), _stem("data/train-00000-of-00002.parquet"), _stem("saved/v1.5")
        ('a', 'train-00000-of-00002', 'v1')
    """
    path = Path(file)
    return Path(path.stem).stem if path.suffix in OPENERS else path.stem


@functools.lru_cache(maxsize=8)
def _contents(tokenizer: Any) -> str:
    """Return a digest of what a tokenizer makes of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    contents = (
        type(tokenizer).__name__,
        vocabulary,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        sorted(getattr(tokenizer, "model_stop_ids", ())),
    )
    return hashlib.sha256(repr(contents).encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def _loaded(source: DataSetKey) -> DataSet:
    """Return a set out of the cache, which is made where it is not there or not whole."""
    if sum(size for _, size in source.states) < ON_DISK:
        memory = pyarrow.BufferOutputStream()
        write_set(source, memory)
        return _read(source, pyarrow.BufferReader(memory.getvalue()))
    with suppress(OSError, pyarrow.ArrowInvalid):
        return _read(source, pyarrow.memory_map(str(source.path)))
    try:
        _keep(source)
    except OSError as error:
        law = f"{source.path.parent}: what comes of the data can't be kept there: {error}"
        raise DataError(f"{law}; name another folder in the environment, as RLGRAPH_CACHE=DIR") from error
    return _read(source, pyarrow.memory_map(str(source.path)))


def _keep(source: DataSetKey) -> None:
    """Write a set under another name and rename it once it is whole; the last of several processes wins."""
    source.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=source.path.parent, ignore_cleanup_errors=True) as aside:
        path = Path(aside, source.path.name)
        with pyarrow.OSFile(str(path), "wb") as sink:
            write_set(source, sink)
        os.replace(path, source.path)


def _read(source: DataSetKey, stored: Any) -> DataSet:
    reader = pyarrow.ipc.open_file(stored)
    batches = []
    filtered = 0
    for number in range(reader.num_record_batches):
        batch, metadata = reader.get_batch_with_custom_metadata(number)
        batches.append(batch)
        filtered += int(metadata[b"filtered"])
    table = pyarrow.Table.from_batches(batches)
    lengths = table["length"].to_numpy()
    return DataSet((table,), source.files, numpy.arange(len(lengths), dtype=numpy.int32), lengths, filtered)
