"""Prepares the rows of a data set: read, filtered, rendered and tokenised, a chunk at a time.

    files ── CHUNK rows at a time ── where ── tokenised ──> FILE:N, token ids, texts, columns

Of large files each chunk is the work of one of several processes.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlgraph.files import cache_folder
from rlgraph.nodes.support.conversation import Asked, ReadingOptions, asked
from rlgraph.nodes.support.data_file import DataError, fits, frequent_values, read_rows
from rlgraph.nodes.support.lazy import pyarrow
from rlgraph.nodes.support.process_map import process_map
from rlgraph.nodes.support.row_field import column_values, path_of
from rlgraph.nodes.support.row_tokens import Example, examples_of, prompt_ids

PlacedRow = tuple[int, str, Mapping[str, Any]]  # the number of a row's file, its place and its fields
SetKind = Literal["prompts", "examples"]
CHUNK = 4096  # rows that are tokenised at a time, by a process, or as many threads as the tokenizer has
BY_PROCESSES = 2**22  # bytes of files from which several processes prepare them, which take seconds to start
MOST_PROCESSES = 32
FORMAT = 6  # of a cached set; another one is made anew


@dataclass(frozen=True)
class DataSetKey:
    """The files, the tokenizer and the reading of a set: the key by which it is cached."""

    kind: SetKind
    files: tuple[tuple[str, str], ...]  # source and file
    states: tuple[tuple[int, int], ...]  # of each file: time of change in ns, bytes
    tokens: str  # the tokenizer's contents
    key: str  # the reading as text
    reading: ReadingOptions = field(compare=False)
    tokenizer: Any = field(compare=False, repr=False)

    @property
    def path(self) -> Path:
        """Return the file in the cache."""
        key = json.dumps([FORMAT, self.kind, self.files, self.states, self.tokens, self.key])
        return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.arrow"


def write_set(source: DataSetKey, sink: Any) -> None:
    """Write a set as an Arrow file; ``filtered`` of a batch says how many rows ``where`` left out beside it.

    Raises:
        DataError: a file or a row is not what the source needs.
    """
    if source.kind == "examples" and source.tokenizer.eos_token_id is None:
        law = f"the tokenizer {source.tokenizer.name_or_path} has no end token"
        raise DataError(f"{law}; set eos_token in its config")
    int32, text = pyarrow.int32(), pyarrow.large_string()
    schema = pyarrow.schema(
        {
            "file": int32,
            "number": pyarrow.int64(),
            "length": int32,
            "ids": pyarrow.large_list(int32),
            "learnt": pyarrow.large_list(pyarrow.bool_()),
            "question": text,
            "answer": text,
            "more": text,
        }
    )
    make = functools.partial(_batch, source, schema)
    processes = _processes(source)
    chunks = _chunks(source)
    batches = process_map(make, chunks, processes) if processes > 1 else map(make, chunks)
    with pyarrow.ipc.new_file(sink, schema) as writer:
        for batch, filtered in _with_one_form_of_answers(source, batches):
            writer.write_batch(batch, custom_metadata={"filtered": str(filtered)})


def _processes(source: DataSetKey) -> int:
    """Return how many processes prepare a set: one for each core, of a large set and a known tokenizer."""
    is_picklable = type(source.tokenizer).__module__.startswith("transformers.")  # others need not be
    is_large = sum(size for _, size in source.states) > BY_PROCESSES
    if is_picklable and is_large:
        return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    return 1


@dataclass(frozen=True)
class MarkedRows:
    """The source of a chunk, and the place of its first row with ``answer_after`` and its first without."""

    source: str
    first_with: str | None
    first_without: str | None


PreparedBatch = tuple[Any, int, MarkedRows | None]  # Arrow, rows left out beside it, and their markers


def _batch(source: DataSetKey, schema: Any, chunk: tuple[list[PlacedRow], int]) -> PreparedBatch:
    """Return a chunk as Arrow, the number of rows that were left out, and which rows have the marker."""
    placed_rows, filtered = chunk
    rows = [asked(place, row, source.reading) for _, place, row in placed_rows]
    batch = pyarrow.RecordBatch.from_pydict(_columns(source, placed_rows, rows), schema)
    if not rows or source.reading.answer_after is None:
        return batch, filtered, None
    first_with = next((row.place for row in rows if row.has_marker), None)
    first_without = next((row.place for row in rows if row.answer and not row.has_marker), None)
    source_name, _ = source.files[placed_rows[0][0]]
    return batch, filtered, MarkedRows(source_name, first_with, first_without)


def _with_one_form_of_answers(
    source: DataSetKey, batches: Iterable[PreparedBatch]
) -> Iterator[tuple[Any, int]]:
    """Yield batches, of sources whose answers all have the marker of ``answer_after`` or all lack it.

    A source without the marker has answers that are taken whole, as verl's and TRL's data sets do. Where only
    some rows have it, a whole derivation would be taken for an answer.

    Raises:
        DataError: some answers of a source have the marker, and others don't.
    """
    first_with: dict[str, str] = {}
    first_without: dict[str, str] = {}
    for batch, filtered, marked in batches:
        if marked is not None and marked.first_with is not None:
            first_with.setdefault(marked.source, marked.first_with)
        if marked is not None and marked.first_without is not None:
            first_without.setdefault(marked.source, marked.first_without)
        for name in first_with.keys() & first_without.keys():
            path, marker = source.reading.answer, source.reading.answer_after
            law = f"{first_without[name]}: no {marker!r} in {path!r}, which {first_with[name]} has"
            raise DataError(f"{law}; correct the row, or set answer_after: null to take every answer whole")
        yield batch, filtered


def _chunks(source: DataSetKey) -> Iterator[tuple[list[PlacedRow], int]]:
    """Yield rows that ``where`` keeps, and of how many read beside them it does not.

    Raises:
        DataError: a source has no row, or none that is kept.
    """
    where = source.reading.where
    files_of_sources: dict[str, dict[int, str]] = {}
    for number, (name, file) in enumerate(source.files):
        files_of_sources.setdefault(name, {})[number] = file
    for files in files_of_sources.values():
        total = matching = 0
        rows = _placed_rows(source, files)
        while chunk := [*islice(rows, CHUNK)]:
            matching_rows = [placed for placed in chunk if fits(placed[1], placed[2], where)]
            total += len(chunk)
            matching += len(matching_rows)
            yield matching_rows, len(chunk) - len(matching_rows)
        file_names = ", ".join(files.values())
        if not total:
            raise DataError(f"{file_names}: no rows; give a file that has some")
        if not matching:
            again = ((place, row) for _, place, row in _placed_rows(source, files))
            raise DataError(f"{file_names}: no row is where {frequent_values(again, where)}")


def _placed_rows(source: DataSetKey, files: Mapping[int, str]) -> Iterator[PlacedRow]:
    """Yield all rows of some files of a set."""
    required, optional = _needed(source.reading)
    for number, file in files.items():
        for place, row in read_rows(file, required, optional):
            yield number, place, row


def _needed(reading: ReadingOptions) -> tuple[list[str], list[str]]:
    """Return the fields that are read of each row, and those that it may lack."""
    required = [*reading.required_paths]
    optional: list[str] = []
    for name, spec in (reading.columns or {}).items():
        has_default = isinstance(spec, dict) and "default" in spec
        fields = optional if has_default else required
        fields.append(path_of(name, spec))
    return required, optional


def _columns(source: DataSetKey, placed_rows: Sequence[PlacedRow], rows: Sequence[Asked]) -> dict[str, Any]:
    """Return the columns of a chunk of rows."""
    reading = source.reading
    if source.kind == "prompts":
        examples: list[Example] = [(ids, []) for ids in prompt_ids(source.tokenizer, reading, rows)]
    else:
        examples = list(examples_of(source.tokenizer, reading, rows))
    columns: dict[str, list[Any]] = {
        "file": [number for number, _, _ in placed_rows],
        "number": [int(place.rpartition(":")[2]) for _, place, _ in placed_rows],
        "more": [json.dumps(column_values(place, row, reading.columns)) for _, place, row in placed_rows],
        "question": [row.words for row in rows],
        "answer": [row.answer for row in rows],
        "length": [len(ids) for ids, _ in examples],
        "ids": [ids for ids, _ in examples],
        "learnt": [learnt for _, learnt in examples],
    }
    return columns
