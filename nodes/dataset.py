"""Reading and tokenising question-answer files, once a process.

Places are written ``FILE:N``, N from 1: the line of a .jsonl file, the row of a .parquet file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlgraph.engines import Tokenizer
from rlgraph.errors import RunError

Template = Literal["chat", "plain"]
Question = str | list[dict[str, Any]]


class DataError(RunError):
    """Data that can't be used: names the file and row, and what to do."""


@dataclass(frozen=True)
class PromptSet:
    """All questions of a source, tokenised; item i of each field speaks of one question."""

    places: Sequence[str]  # FILE:N
    prompts: Sequence[list[int]]
    questions: Sequence[str]
    answers: Sequence[str]
    overlong: int = 0  # rows dropped for their length

    def longest(self) -> tuple[str, int]:
        """Where the longest prompt stands, and its tokens.

        Example:
            >>> PromptSet(["a:1", "a:2"], [[5], [5, 6]], ["", ""], ["", ""]).longest()
            ('a:2', 2)
        """
        row = max(range(len(self.places)), key=lambda row: len(self.prompts[row]))
        return self.places[row], len(self.prompts[row])


@dataclass(frozen=True)
class ExampleSet:
    """All examples of a source: token ids of the prompt, and of the answer with its end token."""

    places: Sequence[str]
    pairs: Sequence[tuple[list[int], list[int]]]
    overlong: int = 0

    def longest(self) -> tuple[str, int]:
        """Where the longest example stands, and its tokens."""
        sizes = [len(before) + len(after) for before, after in self.pairs]
        row = max(range(len(sizes)), key=sizes.__getitem__)
        return self.places[row], sizes[row]


@dataclass(frozen=True)
class Source:
    """What a set is made from: the key under which a process keeps it."""

    files: tuple[str, ...]
    changed: tuple[int, ...]  # when each file was, in ns
    tokenizer_name: str
    question: str
    answer: str | None
    answer_after: str | None
    template: Template
    system: str | None
    suffix: str
    tokenizer: Any = field(compare=False, repr=False)


def load_prompts(
    tokenizer: Tokenizer,
    *,
    files: Sequence[str],
    question: str = "question",
    answer: str | None = "answer",
    answer_after: str | None = None,
    template: Template = "chat",
    system: str | None = None,
    suffix: str = "",
    max_prompt_tokens: int | None = None,
) -> PromptSet:
    """All that ``data.prompts`` with these attributes would go through.

    Raises:
        DataError: a file that is missing, can't be read or lacks a column; a row without what it needs; or no
            row left.
    """
    source = _source(tokenizer, files, question, answer, answer_after, template, system, suffix)
    data = _prompts(source)
    kept = _within([len(ids) for ids in data.prompts], max_prompt_tokens, source, "max_prompt_tokens")
    columns = (
        [column[i] for i in kept] for column in (data.places, data.prompts, data.questions, data.answers)
    )
    return (
        data if len(kept) == len(data.places) else PromptSet(*columns, overlong=len(data.places) - len(kept))
    )


def load_examples(
    tokenizer: Tokenizer,
    *,
    files: Sequence[str],
    question: str = "question",
    answer: str = "answer",
    template: Template = "chat",
    system: str | None = None,
    suffix: str = "",
    max_tokens: int | None = None,
) -> ExampleSet:
    """All that ``data.examples`` with these attributes would go through; raises as ``load_prompts`` does."""
    source = _source(tokenizer, files, question, answer, None, template, system, suffix)
    data = _examples(source)
    kept = _within(
        [len(before) + len(after) for before, after in data.pairs], max_tokens, source, "max_tokens"
    )
    if len(kept) == len(data.pairs):
        return data
    columns = ([column[i] for i in kept] for column in (data.places, data.pairs))
    return ExampleSet(*columns, overlong=len(data.places) - len(kept))


def _source(tokenizer: Any, files: Sequence[str], *arguments: Any) -> Source:
    name = str(getattr(tokenizer, "name_or_path", ""))
    return Source(
        tuple(files), tuple(_changed(file) for file in files), name, *arguments, tokenizer=tokenizer
    )


def _changed(file: str) -> int:
    if not Path(file).is_file():
        raise DataError(f"{file}: there is no such file; give a .parquet or .jsonl file that exists")
    return Path(file).stat().st_mtime_ns


def _within(lengths: Sequence[int], limit: int | None, source: Source, attribute: str) -> list[int]:
    kept = [i for i, length in enumerate(lengths) if limit is None or length <= limit]
    if not kept:
        files = ", ".join(source.files)
        raise DataError(
            f"{files}: all {len(lengths)} rows have over {limit} tokens, the shortest {min(lengths)}; "
            f"raise {attribute}"
        )
    return kept


@functools.lru_cache(maxsize=8)
def _prompts(source: Source) -> PromptSet:
    rows = [row for file in source.files for row in _read(file, source)]
    if not rows:
        raise DataError(f"{', '.join(source.files)}: no rows; give a file that has some")
    places = [place for place, _, _ in rows]
    asked = [_checked(place, question, source) for place, question, _ in rows]
    prompts = _encoded(source, asked)
    for place, ids in zip(places, prompts, strict=True):
        if not ids:
            raise DataError(f"{place}: the question has no tokens; remove the row or give it a question")
    answers = [_answer(place, answer, source) for place, _, answer in rows]
    return PromptSet(places, prompts, [_words(question) for question in asked], answers)


@functools.lru_cache(maxsize=8)
def _examples(source: Source) -> ExampleSet:
    data, end = _prompts(source), source.tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"the tokenizer {source.tokenizer_name} has no end token; set eos_token in its config"
        )
    answers = source.tokenizer(list(data.answers), add_special_tokens=False)["input_ids"]
    return ExampleSet(
        data.places,
        [(before, [*after, end]) for before, after in zip(data.prompts, answers, strict=True)],
    )


def _read(file: str, source: Source) -> Iterator[tuple[str, Any, Any]]:
    """Place, question and answer of each row; the answer is "" where the source names no answer column."""
    readers = {".parquet": _parquet, ".jsonl": _jsonl}
    if Path(file).suffix not in readers:
        raise DataError(f"{file}: is neither .parquet nor .jsonl; convert it, or rename it if it is one")
    columns = [name for name in (source.question, source.answer) if name is not None]
    for place, row in readers[Path(file).suffix](file, columns):
        yield place, row[source.question], "" if source.answer is None else row[source.answer]


def _parquet(file: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(file).names
        _check_columns(file, columns, names)
        rows = pyarrow.parquet.read_table(file, columns=list(columns)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: can't be read as parquet: {error}; write it again") from error
    for number, row in enumerate(rows, 1):
        yield f"{file}:{number}", row


def _jsonl(file: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{place}: not JSON: {error}; each line must be one object") from error
            if not isinstance(row, dict):
                raise DataError(f"{place}: {type(row).__name__}, not an object; write {{...}} a line")
            _check_columns(place, columns, list(row))
            yield place, row


def _check_columns(place: str, wanted: Sequence[str], present: Sequence[str]) -> None:
    for name in wanted:
        if name not in present:
            raise DataError(
                f"{place}: has no column {name!r}, only {', '.join(map(repr, present))}; "
                "name one of them with question: or answer:"
            )


def _checked(place: str, question: Any, source: Source) -> Question:
    """A question as text or as messages without empty keys."""
    if isinstance(question, str):
        return question
    fits = isinstance(question, list) and question and all(isinstance(m, dict) for m in question)
    if not (fits and all(isinstance(m.get(key), str) for m in question for key in ("role", "content"))):
        raise DataError(
            f"{place}: {source.question!r} is neither text nor a list of messages {{role, content}}, "
            f"but {str(question)[:60]!r}; correct the row, or name another column with question:"
        )
    if source.template == "plain":
        raise DataError(f"{place}: {source.question!r} holds chat messages; set template: chat")
    return [{key: value for key, value in message.items() if value is not None} for message in question]


def _words(question: Question) -> str:
    """A question as text: of a conversation, the last message."""
    return question if isinstance(question, str) else question[-1]["content"]


def _answer(place: str, answer: Any, source: Source) -> str:
    if answer is None:
        raise DataError(f"{place}: {source.answer!r} is empty; fill it in, or remove the row")
    words, marker = str(answer), source.answer_after
    if marker is None:
        return words
    if marker not in words:
        raise DataError(
            f"{place}: no {marker!r} in {source.answer!r}: {words[-60:]!r}; correct answer_after:"
        )
    return words.rpartition(marker)[2].strip()


def _encoded(source: Source, questions: Sequence[Question]) -> list[list[int]]:
    """Token ids of each prompt."""
    tokenizer = source.tokenizer
    if source.template == "plain":
        prompts = [f"{source.system or ''}{question}{source.suffix}" for question in questions]
        return list(tokenizer(prompts)["input_ids"])
    if tokenizer.chat_template is None:
        raise DataError(f"the tokenizer {source.tokenizer_name} has no chat template; set template: plain")
    rendered = [
        tokenizer.apply_chat_template(_conversation(source, q), tokenize=False, add_generation_prompt=True)
        for q in questions
    ]
    # the template writes the special tokens itself
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _conversation(source: Source, question: Question) -> list[dict[str, Any]]:
    """Chat messages; ``system`` and ``suffix`` are added to a given conversation too, where they are set."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    if source.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": source.system}, *messages]
    *before, last = messages
    return [*before, {**last, "content": last["content"] + source.suffix}]
