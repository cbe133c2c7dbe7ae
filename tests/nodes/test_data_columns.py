"""Columns that a source takes of its files: by name or path, typed, with a value for rows that lack one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from flattened import flattened
from rlgraph.nodes.data.pairs import pairs
from rlgraph.nodes.data.prompts import examples, prompts
from rlgraph.nodes.support.data_file import DataError
from rlgraph.ops import Context, anything, float32, op, samples
from rlgraph.ops.op_error import OpError
from rlgraph.ops.signature import signature
from rlgraph.runtime.demo import make_tokenizer

prompts, examples, pairs = flattened(prompts), flattened(examples), flattened(pairs)

ROWS: list[dict[str, Any]] = [
    {
        "question": f"{n}+1=",
        "answer": str(n + 1),
        "chosen": str(n + 1),
        "rejected": "0",
        "level": n / 4,
        "count": n,
        "hard": n > 1,
        "about": {"tests": [{"input": str(n), "limits": [n, None]}], "who": f"w{n}"},
    }
    for n in range(4)
]
COLUMNS: dict[str, Any] = {
    "level": "float32",
    "count": "int64",
    "hard": "boolean",
    "about": "json",
    "who": {"from": "about.who"},
    "first": {"from": "about.tests[0].limits", "type": "json"},
    "given": {"from": "about.tests[-1].input", "type": "text"},
    "rubric": {"default": "none"},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = make_tokenizer()
    made.name_or_path = "characters"
    return made


def jsonl(directory: Path, rows: list[dict[str, Any]]) -> str:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory / "rows.jsonl")


def parquet(directory: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / "rows.parquet")
    return str(directory / "rows.parquet")


def context() -> Context:
    return Context(node="prompts", seed=3, iteration=0, position=0)


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("source", [prompts, examples, pairs])
def test_columns_are_of_their_types_and_of_their_rows(
    tmp_path: Path, tokenizer: Any, write: Any, source: Any
) -> None:
    options = {"files": [write(tmp_path, ROWS)], "batch": 4, "template": "plain", "columns": COLUMNS}
    out = source(tokenizer, context(), **options)
    assert (out.level.dtype, out.count.dtype, out.hard.dtype) == (torch.float32, torch.int64, torch.bool)
    order = out.count.tolist()
    assert order != sorted(order) and sorted({*order}) == [0, 1, 2, 3]
    assert out.level.tolist() == [n / 4 for n in order] and out.hard.tolist() == [n > 1 for n in order]
    assert out.about == [ROWS[n]["about"] for n in order]
    assert out.who == [f"w{n}" for n in order] and out.given == [str(n) for n in order]
    assert out.first == [[n, None] for n in order] and out.rubric == ["none"] * len(order)
    if source is pairs:
        assert order[::2] == order[1::2]


def test_a_field_may_be_missing_in_some_rows(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{**ROWS[0], "hint": "h"}, ROWS[1], {**ROWS[2], "hint": None}]
    for file in (jsonl(tmp_path, rows), parquet(tmp_path, rows)):
        options: dict[str, Any] = {"files": [file], "batch": "all", "template": "plain"}
        out = prompts(tokenizer, context(), columns={"hint": {"default": ""}}, **options)
        assert out.hint == ["h", "", ""]
        none = {"hint": {"type": "json", "default": None}}
        assert prompts(tokenizer, context(), columns=none, **options).hint == ["h", None, None]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"levl": "float32"}, "has no column 'levl', only 'question'.*did you mean `level`"),
    ({"x": {"from": "about.tets"}}, r":1: has no column 'about.tets', only .*did you mean `about.tests`"),
    ({"x": {"from": "about.tests[3]"}}, r":1: has no column 'about.tests\[3\]'"),
    ({"count": "boolean"}, ":1: 'count' is no boolean, but 0"),
    ({"hard": "int64"}, ":1: 'hard' is no int64, but False"),
    ({"about": "text"}, ":1: 'about' is no text, but {'tests'"),
    ({"question": "float32"}, r":1: 'question' is no float32, but '0\+1='"),
]


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize(("columns", "said"), WRONG)
def test_what_does_not_fit_names_file_row_and_field(
    tmp_path: Path, tokenizer: Any, write: Any, columns: dict[str, Any], said: str
) -> None:
    file = write(tmp_path, ROWS)
    with pytest.raises(DataError, match=said):
        prompts(tokenizer, context(), files=[file], batch=1, template="plain", columns=columns)


def test_a_null_needs_a_default(tmp_path: Path, tokenizer: Any) -> None:
    options: dict[str, Any] = {"batch": 1, "template": "plain", "columns": {"level": "float32"}}
    file = jsonl(tmp_path, [ROWS[0], {**ROWS[1], "level": None}])
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: 'level' is no float32, but None; give a default: for"
    ):
        prompts(tokenizer, context(), files=[file], **options)


def test_question_answer_and_where_take_paths_too(tmp_path: Path, tokenizer: Any) -> None:
    out = prompts(
        tokenizer,
        context(),
        files=[parquet(tmp_path, ROWS)],
        batch="all",
        template="plain",
        question="about.tests[0].input",
        answer="about.who",
        where={"about.who": ["w1", "w3"]},
    )
    assert (out.question, out.answer) == (["1", "3"], ["w1", "w3"])


def test_what_an_op_reads_beside_its_signature_is_named_by_an_attribute() -> None:
    def more(tests: float32[samples], *, names: list[str], **more: anything[samples]) -> float32[samples]: ...

    declared = signature("more", op(reads=("names",))(more))
    assert [port.name for port in declared.further({"names": ["rubric", "tests", "rubric"]})] == ["rubric"]
    texts = signature("more", op(reads=("names", "response"))(more))
    assert [port.name for port in texts.further({"names": "{a} {response} {{b}} {c_1} {2}"})] == ["a", "c_1"]
    for reads in ((), ("other",)):
        with pytest.raises(OpError, match="names the attribute with the names of what"):
            signature("more", op(reads=reads)(more))
