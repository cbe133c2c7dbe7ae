"""Data sets that data sources go through: rows of files, filtered and tokenised once per process."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Self

from rlgraph.nodes.support.chat_template import TemplateError, rendered
from rlgraph.nodes.support.data_file import DataError, changed, fits, read_rows, seen
from rlgraph.nodes.support.row_field import column_values, given, path_of
from rlgraph.ops import Tokenizer

Template = Literal["chat", "plain"]
Question = str | list[dict[str, Any]]
SourceFiles = Sequence[str] | Mapping[str, Sequence[str]]
Sequences = tuple[list[int], list[int]]  # prompt; answer with its end token


@dataclass(frozen=True)
class ReadingOptions:
    """Attributes of all sources that say how rows become prompts. See ``rlgraph.nodes.data.prompts``."""

    question: str = "question"
    answer: str | None = "answer"
    answer_after: str | None = None
    template: Template = "chat"
    template_options: Mapping[str, Any] | None = None
    system: str | None = None
    suffix: str = ""
    where: Mapping[str, Any] | None = None
    columns: Mapping[str, Any] | None = None


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

    def within(self, limit: int | None, attribute: str) -> Self:
        """Return the rows of at most ``limit`` tokens.

        Raises:
            DataError: a source has none; ``attribute`` is what could be raised.
        """
        if limit is None:
            return self
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
    """Token ids of each prompt, and of its answer with the end token."""

    pairs: Sequence[Sequences]


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
    tokenizer: Tokenizer, *, files: SourceFiles, max_prompt_tokens: int | None = None, **reading: Any
) -> PromptSet:
    """Load all prompts that ``data.prompts`` with these attributes goes through.

    ``files`` are those of one source, or of each by its name; ``reading`` are ``ReadingOptions``.

    Raises:
        DataError: a file that is missing, can't be read or lacks a column; a row without what it needs; or no
            row left.
    """
    return _prompts(source_of(tokenizer, files, reading)).within(max_prompt_tokens, "max_prompt_tokens")


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
    reading = source.reading
    asked = [(place, *_turns(place, row, reading)) for _, place, row in kept]
    texts = [_written(place, source.tokenizer, reading, question) for place, question, _ in asked]
    prompts = encode(source.tokenizer, reading, texts)
    for (place, _, _), ids in zip(asked, prompts, strict=True):
        if not ids:
            raise DataError(f"{place}: the question has no tokens; remove the row or give it a question")
    return PromptSet(
        places=[place for place, _, _ in asked],
        sources=[name for name, _, _ in kept],
        lengths=[len(ids) for ids in prompts],
        filtered=filtered,
        more=[column_values(place, row, reading.columns) for _, place, row in kept],
        prompts=prompts,
        questions=[_words(question) for _, question, _ in asked],
        answers=[answer for _, _, answer in asked],
    )


@functools.lru_cache(maxsize=8)
def _examples(source: DataSetKey) -> ExampleSet:
    data, end = _prompts(source), source.tokenizer.eos_token_id
    if end is None:
        law = f"the tokenizer {source.tokenizer_name} has no end token"
        raise DataError(f"{law}; set eos_token in its config")
    answers = source.tokenizer(list(data.answers), add_special_tokens=False)["input_ids"]
    pairs = [(before, [*after, end]) for before, after in zip(data.prompts, answers, strict=True)]
    lengths = [len(before) + len(after) for before, after in pairs]
    return ExampleSet(data.places, data.sources, lengths, data.filtered, more=data.more, pairs=pairs)


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


def _written(place: str, tokenizer: Any, reading: ReadingOptions, question: Question) -> str:
    try:
        return written(tokenizer, reading, question)
    except TemplateError as error:
        raise TemplateError(f"{place}: {error}") from error


def _columns(reading: ReadingOptions) -> tuple[list[str], list[str]]:
    """Return the fields that are read of each row, and those that it may lack."""
    named, columns = [reading.question, reading.answer, *(reading.where or ())], reading.columns or {}
    optional = [name for name, spec in columns.items() if isinstance(spec, dict) and "default" in spec]
    named += [path_of(name, spec) for name, spec in columns.items() if name not in optional]
    needed = dict.fromkeys(name for name in named if name is not None)
    return [*needed], [path_of(name, columns[name]) for name in optional]


def _turns(place: str, row: Mapping[str, Any], reading: ReadingOptions) -> tuple[Question, str]:
    """Return the question and the answer; a conversation's last turn is the answer if the assistant's."""
    question = _checked(place, given(place, row, reading.question), reading)
    if reading.answer is not None:
        return question, _answer(place, given(place, row, reading.answer), reading)
    if isinstance(question, str) or question[-1]["role"] != "assistant":
        return question, ""
    if len(question) == 1:
        raise DataError(f"{place}: the conversation has nothing before the assistant's turn; add a question")
    return question[:-1], _answer(place, question[-1]["content"], reading)


def _checked(place: str, question: Any, reading: ReadingOptions) -> Question:
    """Return a question as text or as messages without empty keys."""
    if isinstance(question, str):
        return question
    fits = isinstance(question, list) and question and all(isinstance(m, dict) for m in question)
    if not (fits and all(isinstance(m.get(key), str) for m in question for key in ("role", "content"))):
        raise DataError(
            f"{place}: {reading.question!r} is neither text nor a list of messages {{role, content}}, "
            f"but {str(question)[:60]!r}; correct the row, or name another column with question:"
        )
    if reading.template == "plain":
        raise DataError(f"{place}: {reading.question!r} holds chat messages; set template: chat")
    return [{key: value for key, value in message.items() if value is not None} for message in question]


def _words(question: Question) -> str:
    """Return a question as text; of a conversation, the last message."""
    return question if isinstance(question, str) else question[-1]["content"]


def _answer(place: str, answer: Any, reading: ReadingOptions) -> str:
    if answer is None:
        raise DataError(f"{place}: {reading.answer!r} is empty; fill it in, or remove the row")
    words, marker = str(answer), reading.answer_after
    if marker is None:
        return words
    if marker not in words:
        law = f"{place}: no {marker!r} in {reading.answer!r}: {words[-60:]!r}"
        raise DataError(f"{law}; correct answer_after:")
    return words.rpartition(marker)[2].strip()


def encode(tokenizer: Any, reading: ReadingOptions, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts as they are written; a chat template writes special tokens itself."""
    return list(tokenizer(list(texts), add_special_tokens=reading.template == "plain")["input_ids"])


def written(tokenizer: Any, reading: ReadingOptions, question: Question) -> str:
    """Return a question as the text of a prompt.

    Raises:
        DataError: the tokenizer has no chat template, and the reading wants one.
        TemplateError: its chat template can't write the question.
    """
    if reading.template == "plain":
        return f"{reading.system or ''}{question}{reading.suffix}"
    options = reading.template_options or {}
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise DataError(f"the tokenizer {tokenizer.name_or_path} has no chat template; set template: plain")
    return rendered(tokenizer, _conversation(reading, question), options)


def _conversation(reading: ReadingOptions, question: Question) -> list[dict[str, Any]]:
    """Return chat messages; ``system`` and ``suffix`` are added to a given conversation too, where set."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    if reading.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": reading.system}, *messages]
    *before, last = messages
    return [*before, {**last, "content": last["content"] + reading.suffix}]
