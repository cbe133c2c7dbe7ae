"""Data sets that data sources go through: rows of files, filtered and tokenised once per process."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from rlgraph.nodes.support.chat_template import TemplateError
from rlgraph.nodes.support.conversation import (
    Asked,
    ReadingOptions,
    asked,
    marked_by_template,
    pieces_of,
    written,
)
from rlgraph.nodes.support.data_file import DataError, changed, fits, read_rows, seen
from rlgraph.nodes.support.row_field import column_values, path_of
from rlgraph.ops import Tokenizer

SourceFiles = Sequence[str] | Mapping[str, Sequence[str]]
Example = tuple[list[int], list[bool]]  # token ids; which of them are learnt


@dataclass(frozen=True)
class DataSet:
    """All rows of a source; item i of each sequence belongs to one row."""

    places: Sequence[str]  # FILE:N
    sources: Sequence[str]  # the name under which ``files`` lists it
    lengths: Sequence[int]  # tokens that a model must have room for
    filtered: int = 0  # rows that ``where`` leaves out
    overlong: int = 0  # rows dropped for their length
    more: Sequence[Mapping[str, Any]] = ()  # what ``columns`` takes of each row

    def longest(self) -> tuple[str, int]:
        """Return the place of the longest row, and its tokens."""
        return max(zip(self.places, self.lengths, strict=True), key=itemgetter(1))

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
        if truncate:
            cut = [min(length, limit) for length in self.lengths]
            return replace(self, lengths=cut, overlong=sum(length > limit for length in self.lengths))
        kept = [row for row, length in enumerate(self.lengths) if length <= limit]
        for name in dict.fromkeys(self.sources):
            mine = [row for row, source in enumerate(self.sources) if source == name]
            shortest = min(self.lengths[row] for row in mine)
            if shortest > limit:
                files = ", ".join(dict.fromkeys(self.places[row].rpartition(":")[0] for row in mine))
                law = f"all {len(mine)} rows have over {limit} tokens, the shortest {shortest}"
                raise DataError(f"{files}: {law}; raise {attribute}")
        columns = [f.name for f in fields(self) if f.name not in ("filtered", "overlong")]
        taken = {name: [getattr(self, name)[row] for row in kept] for name in columns}
        return replace(self, **taken, overlong=len(self.lengths) - len(kept))


@dataclass(frozen=True, kw_only=True)
class PromptSet(DataSet):
    """Questions, tokenised.

    Example:
        >>> ids = [[5], [5, 6]]
        >>> PromptSet(["a:1", "a:2"], "aa", [1, 2], prompts=ids, questions="xy", answers="zz").longest()
        ('a:2', 2)
    """

    prompts: Sequence[list[int]]
    questions: Sequence[str]
    answers: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ExampleSet(DataSet):
    """Token ids of each conversation, and which of them are learnt."""

    examples: Sequence[Example]


@dataclass(frozen=True)
class DataSetKey:
    """The files and the reading of a set: the key under which a process caches it."""

    files: tuple[tuple[str, tuple[str, ...]], ...]  # name -> its files
    changed: tuple[int, ...]  # ns; each file's time of change
    tokenizer_name: str
    key: str  # the reading as text
    reading: ReadingOptions = field(compare=False)
    tokenizer: Any = field(compare=False, repr=False)


def load_prompts(
    tokenizer: Tokenizer,
    *,
    files: SourceFiles,
    max_prompt_tokens: int | None = None,
    truncate: str | None = None,
    **reading: Any,
) -> PromptSet:
    """Load all prompts that ``data.prompts`` with these attributes goes through.

    ``files`` are those of one source, or of each by its name; ``reading`` are ``ReadingOptions``.

    Raises:
        DataError: a file that is missing, can't be read or lacks a column; a row without what it needs; or no
            row left.
    """
    data = _prompts(source_of(tokenizer, files, reading))
    return data.within(max_prompt_tokens, "max_prompt_tokens", truncate)


def load_examples(
    tokenizer: Tokenizer, *, files: SourceFiles, max_tokens: int | None = None, **reading: Any
) -> ExampleSet:
    """Load all examples that ``data.examples`` with these attributes goes through."""
    return _examples(source_of(tokenizer, files, reading)).within(max_tokens, "max_tokens")


def source_of(tokenizer: Any, files: SourceFiles, reading: Mapping[str, Any]) -> DataSetKey:
    """Return the key of these rows: the files as they are now, and how they are read.

    A list of files is one source, named after the first of them.
    """
    named = files if isinstance(files, Mapping) else {Path(files[0]).stem: files}
    settled = ReadingOptions(**reading)
    return DataSetKey(
        files=tuple((name, tuple(paths)) for name, paths in named.items()),
        changed=tuple(changed(file) for paths in named.values() for file in paths),
        tokenizer_name=str(getattr(tokenizer, "name_or_path", "")),
        key=json.dumps(asdict(settled), sort_keys=True),
        reading=settled,
        tokenizer=tokenizer,
    )


@functools.lru_cache(maxsize=8)
def _prompts(source: DataSetKey) -> PromptSet:
    kept, filtered = _kept(source)
    reading, tokenizer = source.reading, source.tokenizer
    rows, texts = [asked(place, row, reading) for _, place, row in kept], []
    for row in rows:
        with _placed(row.place):
            texts.append(written(tokenizer, reading, row.question, row.options))
    prompts = encode(tokenizer, reading, texts)
    for row, ids in zip(rows, prompts, strict=True):
        if not ids:
            raise DataError(f"{row.place}: the question has no tokens; remove the row or give it a question")
    return PromptSet(
        **_common(kept, reading, prompts),
        filtered=filtered,
        prompts=prompts,
        questions=[row.words for row in rows],
        answers=[row.answer for row in rows],
    )


@functools.lru_cache(maxsize=8)
def _examples(source: DataSetKey) -> ExampleSet:
    kept, filtered = _kept(source)
    if source.tokenizer.eos_token_id is None:
        law = f"the tokenizer {source.tokenizer_name} has no end token"
        raise DataError(f"{law}; set eos_token in its config")
    rows = [asked(place, row, source.reading) for _, place, row in kept]
    examples = list(_tokenised(source.tokenizer, source.reading, rows))
    common = _common(kept, source.reading, [ids for ids, _ in examples])
    return ExampleSet(**common, filtered=filtered, examples=examples)


def _common(
    kept: Sequence[tuple[str, str, Mapping[str, Any]]], reading: ReadingOptions, ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    return {
        "places": [place for _, place, _ in kept],
        "sources": [name for name, _, _ in kept],
        "lengths": [len(row) for row in ids],
        "more": [column_values(place, row, reading.columns) for _, place, row in kept],
    }


def _tokenised(tokenizer: Any, reading: ReadingOptions, rows: Sequence[Asked]) -> Iterator[Example]:
    """Yield the ids of each row and which of them are learnt; an end token is behind the last turn.

    Raises:
        DataError: a row has nothing before what is learnt.
        TemplateError: a chat template can't write one.
    """
    marked, pieces = [], []
    for row in rows:
        with _placed(row.place):
            marked.append(marked_by_template(tokenizer, reading, row))
            pieces.append([] if marked[-1] else pieces_of(tokenizer, reading, row))
    first = iter(encode(tokenizer, reading, [row[0][0] for row in pieces if row]))
    texts = [text for row in pieces for text, _ in row[1:]]
    rest = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    for row, made, parts in zip(rows, marked, pieces, strict=True):
        ids, mask = made or ([], [])
        for number, (_, learnt) in enumerate(parts):
            part = next(rest if number else first)
            ids, mask = [*ids, *part], [*mask, *[learnt] * len(part)]
        if not row.turns or ids[-1:] != [tokenizer.eos_token_id]:
            ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
        if mask[:1] != [False]:
            raise DataError(f"{row.place}: the question has no tokens; remove the row or give it a question")
        yield ids, mask


def _kept(source: DataSetKey) -> tuple[list[tuple[str, str, Mapping[str, Any]]], int]:
    """Return source, place and columns of each row that ``where`` keeps, and how many it leaves out."""
    reading, kept, filtered = source.reading, [], 0
    for name, files in source.files:
        rows = [row for file in files for row in read_rows(file, *_columns(reading))]
        if not rows:
            raise DataError(f"{', '.join(files)}: no rows; give a file that has some")
        fitting = [(name, place, row) for place, row in rows if fits(place, row, reading.where)]
        if not fitting:
            raise DataError(f"{', '.join(files)}: no row is where {seen(rows, reading.where)}")
        kept, filtered = kept + fitting, filtered + len(rows) - len(fitting)
    return kept, filtered


def _columns(reading: ReadingOptions) -> tuple[list[str], list[str]]:
    """Return the fields that are read of each row, and those that it may lack."""
    columns = reading.columns or {}
    optional = [name for name, spec in columns.items() if isinstance(spec, dict) and "default" in spec]
    named = [path_of(name, spec) for name, spec in columns.items() if name not in optional]
    return [*reading.named, *named], [path_of(name, columns[name]) for name in optional]


@contextmanager
def _placed(place: str) -> Iterator[None]:
    """Name the row in what is said of a chat template."""
    try:
        yield
    except TemplateError as error:
        raise TemplateError(f"{place}: {error}") from error


def encode(tokenizer: Any, reading: ReadingOptions, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts as they are written; a chat template writes special tokens itself."""
    special = reading.template == "plain"
    return list(tokenizer(list(texts), add_special_tokens=special)["input_ids"]) if texts else []
