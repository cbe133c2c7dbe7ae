"""Each kind of file and each type in it: rows are what the writer had, or refused with FILE:N and field."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import subprocess
import sys
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from flattened import flattened
from rlgraph.nodes.data.prompts import prompts
from rlgraph.nodes.support.data_file import DataError, fits, matching, read_rows
from rlgraph.nodes.support.dataset import load_prompts, source_of
from rlgraph.nodes.support.row_field import column_values
from rlgraph.ops import Context
from rlgraph.runtime.demo import make_tokenizer

prompts = flattened(prompts)


def tool(name: str, **fields: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": fields}
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


# what differs from row to row: a mapping's keys, the type of a value, at several depths
MIXED: list[dict[str, Any]] = [
    {"tools": tool("f", q={"type": "string"}), "gold": 7, "tests": [{"in": [1, "x"], "out": {"a": None}}]},
    {
        "tools": tool("g", n={"minimum": 0, "type": "integer"}),
        "gold": "7.50",
        "tests": [{"in": 2, "out": 0.5}],
    },
    {"tools": tool("h"), "gold": ["7", "seven"], "tests": []},
]
QUESTIONS = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(7)]


def read(file: Any, *columns: str) -> list[Any]:
    """The rows of a file: of one column the values, of several mappings."""
    rows = [row for _, row in read_rows(str(file), columns)]
    return [row[columns[0]] for row in rows] if len(columns) == 1 else rows


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(folder: Path, values: Any, kind: Any = None) -> Path:
    """A file with one column, x."""
    column = values if isinstance(values, pyarrow.Array) else pyarrow.array(values, kind)
    pyarrow.parquet.write_table(pyarrow.table({"x": column}), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = make_tokenizer()
    made.name_or_path = "characters"
    return made


def context() -> Context:
    return Context(node="prompts", seed=0, iteration=0, position=0)


# --- JSON columns of datasets


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "rows.jsonl").write_text(lines(MIXED))
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache")
        )
    finally:
        datasets.enable_progress_bars()


def test_what_datasets_writes_of_mixed_rows_is_read_as_the_rows(mixed: Any, tmp_path: Path) -> None:
    """arrow.json: a whole column (gold), and a field at the end of lists of mappings (tools)."""
    table = mixed.with_format("arrow")[:]
    assert "arrow.json" in str(table.schema), "else the test is of nothing"
    mixed.save_to_disk(tmp_path / "saved")
    mixed.to_parquet(tmp_path / "rows.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "rows.arrow", compression="uncompressed")
    for file in ("saved", "rows.parquet", "rows.arrow"):
        rows = read(tmp_path / file, "tools", "gold", "tests")
        assert [row["tools"] for row in rows] == [row["tools"] for row in MIXED], file
        # a writer that knows the type of one row's values makes a number of the text of another
        assert rows[0]["gold"] == 7 and rows[2]["gold"] == ["7", "seven"], file
        assert rows[0]["tests"] == MIXED[0]["tests"] and rows[2]["tests"] == [], file


def test_a_path_goes_into_a_json_column(tmp_path: Path) -> None:
    column = pyarrow.array(['{"tests": [{"in": "1"}]}', '{"tests": [{"in": "2"}]}'], pyarrow.json_())
    rows = list(read_rows(str(parquet(tmp_path, column)), ["x.tests[0].in"]))
    assert [column_values(*row, {"t": {"from": "x.tests[0].in"}}) for row in rows] == [{"t": "1"}, {"t": "2"}]


def test_json_in_a_struct_in_a_list_and_null(tmp_path: Path) -> None:
    inner = pyarrow.StructArray.from_arrays(
        [pyarrow.array(['{"a": 1}', None, '"t"'], pyarrow.json_())], names=["j"]
    )
    nested = pyarrow.ListArray.from_arrays([0, 2, 3], inner)
    assert read(parquet(tmp_path, nested), "x") == [[{"j": {"a": 1}}, {}], [{"j": "t"}]]


@pytest.mark.parametrize("text", ['{"a": ', "", '"\\ud83d"'])
def test_a_json_column_that_is_not_json_is_named(tmp_path: Path, text: str) -> None:
    file = parquet(tmp_path, pyarrow.array(["1", text], pyarrow.json_()))
    with pytest.raises(DataError, match=rf"^{file}:2: 'x' is a column of JSON .* holds what is not"):
        read(file, "x")


def test_json_that_pyarrow_has_no_type_for_is_known_by_its_metadata(tmp_path: Path) -> None:
    """As a pyarrow that does not know the type reads it."""
    field = pyarrow.field("x", pyarrow.string(), metadata={"ARROW:extension:name": "arrow.json"})
    table = pyarrow.table([pyarrow.array(['{"a": 1}'])], schema=pyarrow.schema([field]))
    with pyarrow.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "rows.arrow", "x") == [{"a": 1}]


# --- types of Arrow

KINDS: list[tuple[Any, Any, list[Any]]] = [
    (
        [[("a", 1), ("b", 2)], None, []],
        pyarrow.map_(pyarrow.string(), pyarrow.int64()),
        [{"a": 1, "b": 2}, None, {}],
    ),
    (
        [[("a", {"x": 1, "y": None})]],
        pyarrow.map_(pyarrow.string(), pyarrow.struct({"x": "int64", "y": "int64"})),
        [{"a": {"x": 1}}],
    ),
    ([[("k", [b"v"])]], pyarrow.map_(pyarrow.binary(), pyarrow.list_(pyarrow.binary())), [{"k": ["v"]}]),
    ([[[("a", 1)], []]], pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.int8())), [[{"a": 1}, {}]]),
    (["ä".encode(), None], "binary", ["ä", None]),
    ([b"abc"], "large_binary", ["abc"]),
    ([b"abc"], pyarrow.binary(3), ["abc"]),
    ([b"abc"], pyarrow.binary_view(), ["abc"]),
    ([{"b": b"abc"}], pyarrow.struct({"b": pyarrow.binary()}), [{"b": "abc"}]),
    (["a"], "large_string", ["a"]),
    (["a"], pyarrow.string_view(), ["a"]),
    (["a", None, "a"], pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), ["a", None, "a"]),
    ([b"a"], pyarrow.dictionary(pyarrow.int8(), pyarrow.binary()), ["a"]),
    ([["a"], []], pyarrow.large_list(pyarrow.string()), [["a"], []]),
    ([[1, 2]], pyarrow.list_(pyarrow.int64(), 2), [[1, 2]]),
    ([Decimal("12"), Decimal("-3")], pyarrow.decimal128(10, 0), [12, -3]),
    ([Decimal("1.50")], pyarrow.decimal128(10, 2), ["1.50"]),
    ([Decimal("0.10")], pyarrow.decimal256(50, 2), ["0.10"]),
    ([0.1, None], "float32", [0.1, None]),
    ([1.5], "float16", [1.5]),
    ([2**64 - 1], "uint64", [2**64 - 1]),
    ([True, None], "bool", [True, None]),
    ([None, None], "null", [None, None]),
    ([uuid.UUID(int=7).bytes], pyarrow.uuid(), ["00000000-0000-0000-0000-000000000007"]),
    ([1, 0], pyarrow.bool8(), [True, False]),
    (
        [{"x": 1}, {"y": "b"}, None],
        pyarrow.struct({"x": "int64", "y": "string"}),
        [{"x": 1}, {"y": "b"}, None],
    ),
    (
        [[{"x": {"p": 1}}, {"x": {"q": None}}]],
        pyarrow.list_(pyarrow.struct({"x": pyarrow.struct({"p": "int64", "q": "int64"})})),
        [[{"x": {"p": 1}}, {"x": {}}]],
    ),
    ([[1, None]], pyarrow.list_(pyarrow.int64()), [[1, None]]),
]


def typed(values: Any, kind: Any) -> pyarrow.Array:
    if isinstance(kind, pyarrow.BaseExtensionType):
        return pyarrow.ExtensionArray.from_storage(kind, pyarrow.array(values, kind.storage_type))
    return pyarrow.array(values, kind)


@pytest.mark.parametrize(("values", "kind", "wanted"), KINDS, ids=[str(kind) for _, kind, _ in KINDS])
def test_a_value_of_arrow_is_the_value_that_json_has(
    tmp_path: Path, values: Any, kind: Any, wanted: list[Any]
) -> None:
    column = typed(values, kind)
    with pyarrow.ipc.new_file(tmp_path / "rows.arrow", pyarrow.schema({"x": column.type})) as writer:
        writer.write_table(pyarrow.table({"x": column}))
    for file in (parquet(tmp_path, column), tmp_path / "rows.arrow"):
        assert read(file, "x") == wanted
        assert json.loads(json.dumps(read(file, "x"))) == wanted, "all is of JSON"


DAY = datetime.datetime(2024, 5, 6, 7, 8, 9)
REFUSED: list[tuple[Any, Any, str]] = [
    ([DAY.date()], "date32", "the date or time 2024-05-06; write it as the text that is meant"),
    ([DAY], pyarrow.timestamp("us"), "the date or time 2024-05-06 07:08:09; write"),
    ([7], pyarrow.timestamp("ns"), "the date or time 1970-01-01 00:00:00.000000007; write"),
    ([DAY], pyarrow.timestamp("ms", "Europe/Berlin"), r"the date or time 2024-05-06 09:08:09\+02:00; write"),
    ([DAY.time()], "time64[us]", "the date or time 07:08:09; write"),
    ([DAY - datetime.datetime(2024, 5, 5)], "duration[s]", "the date or time 1 day, 7:08:09; write"),
    ([[DAY]], pyarrow.list_(pyarrow.timestamp("us")), "the date or time 2024-05-06 07:08:09; write"),
    ([b"\xff\xfe"], "binary", r"b'\\xff\\xfe', bytes that are not UTF-8 text; write them as text"),
    ([{"b": [b"\xff"]}], pyarrow.struct({"b": pyarrow.list_(pyarrow.binary())}), "bytes that are not UTF-8"),
    (
        [[("a", 1), ("a", 2)]],
        pyarrow.map_(pyarrow.string(), pyarrow.int64()),
        r"the map .* whose keys are not texts that differ",
    ),
    (
        [[(1, "x")]],
        pyarrow.map_(pyarrow.int64(), pyarrow.string()),
        r"the map \(\(1, 'x'\),\), whose keys are not texts",
    ),
    (
        [[0.5, float("nan")]],
        pyarrow.list_(pyarrow.float64()),
        "nan, which is not a number of JSON; fill it in",
    ),
    ([float("inf")], "float64", "inf, which is not a number of JSON; fill it in"),
    ([[Decimal("1.50")]], pyarrow.list_(pyarrow.decimal128(5, 2)), "the decimal 1.50 in a list or mapping"),
]


@pytest.mark.parametrize(("values", "kind", "said"), REFUSED, ids=[f"{v}" for v, _, _ in REFUSED])
def test_what_json_has_no_value_for_is_refused_where_it_is_asked_for(
    tmp_path: Path, values: Any, kind: Any, said: str
) -> None:
    column = pyarrow.array([None, *values], kind)
    beside = pyarrow.StructArray.from_arrays([pyarrow.array(["fine"] * 2), column], names=["y", "x"])
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"x": column, "in": beside}), file)
    for columns, optional, named in ((["x"], [], "x"), (["in.y"], ["x"], "x"), (["in.x"], [], "in.x")):
        with pytest.raises(DataError, match=rf"^{file}:2: '{named}' holds .*{said}"):
            list(read_rows(str(file), columns, optional))
    assert [row["in"]["y"] for _, row in read_rows(str(file), ["in.y"])] == ["fine"] * 2, (
        "what is beside is read"
    )


def test_pandas_and_datasets_write_what_is_read(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {
            "text": ["007", None, "x"],
            "tests": [[{"a": 1}], [{"b": "2"}], []],
            "number": [1, None, 3],  # pandas makes floats of these
            "kind": pandas.Categorical(["u", "v", "u"]),
        }
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    rows = read(tmp_path / "rows.parquet", "text", "tests", "number", "kind")
    assert [row["text"] for row in rows] == ["007", None, "x"]
    assert [row["tests"] for row in rows] == [[{"a": 1}], [{"b": "2"}], []]
    assert [row["number"] for row in rows] == [1.0, None, 3.0]
    assert [row["kind"] for row in rows] == ["u", "v", "u"]
    features = datasets.Features(
        {"label": datasets.ClassLabel(names=["no", "yes"]), "turns": [{"role": datasets.Value("string")}]}
    )
    data = datasets.Dataset.from_list([{"label": "yes", "turns": [{"role": "user"}]}], features=features)
    data.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", "label", "turns") == [{"label": 1, "turns": [{"role": "user"}]}]


# --- a value as a typed column


def column(value: Any, kind: Any) -> Any:
    return column_values("a.jsonl:3", {"x": value}, {"x": kind})["x"]


TAKEN = [("3.10", "text", "3.10"), (72, "text", "72"), (10**30, "text", "1" + "0" * 30), (0.5, "text", "0.5")]
TAKEN += [(3, "float32", 3), (2**63 - 1, "int64", 2**63 - 1), (10**30, "json", 10**30), (None, "json", None)]
NOT_TAKEN = [
    (72.0, "text", r"72\.0; write it as the text that is meant, or as a whole number"),
    (True, "text", "True; correct the row, or type:"),
    (float("nan"), "text", "nan; give a default:"),
    (float("nan"), "float32", "nan; give a default:"),
    (float("inf"), "float32", "inf; it is beyond the range of float32"),
    (1e39, "float32", "e[+]39; it is beyond the range of float32"),
    (2**63, "int64", "9223372036854775808; it is beyond 64 bits; type: text"),
    (-(2**63) - 1, "int64", "it is beyond 64 bits"),
    (3.0, "int64", r"3\.0; correct the row"),
    ("3", "int64", "'3'; correct the row"),
    ([float("nan")], "json", r"\[nan\]; correct the row"),
]


@pytest.mark.parametrize(("value", "kind", "wanted"), TAKEN)
def test_a_value_keeps_its_type_up_to_the_column(value: Any, kind: str, wanted: Any) -> None:
    assert column(value, kind) == wanted and type(column(value, kind)) is type(wanted)


@pytest.mark.parametrize(("value", "kind", "said"), NOT_TAKEN)
def test_a_value_that_a_column_can_not_have_is_refused_at_load(value: Any, kind: str, said: str) -> None:
    with pytest.raises(DataError, match=rf"^a\.jsonl:3: 'x' is no {kind}, but .*{said}"):
        column(value, kind)


@pytest.mark.parametrize("write", ["jsonl", "parquet"])
@pytest.mark.parametrize("answer", [72.0, float("nan"), float("inf"), True])
def test_an_answer_that_has_no_one_text_is_refused(
    tmp_path: Path, tokenizer: Any, write: str, answer: Any
) -> None:
    """A whole number beside a missing one is 72.0 in what pandas writes, and no response is equal to that."""
    rows = [{"question": "1+1=", "answer": answer}]
    file = tmp_path / f"rows.{write}"
    if write == "jsonl":
        file.write_text(lines(rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with pytest.raises(DataError, match=rf"^{file}:1: 'answer' (is|holds) "):
        load_prompts(tokenizer, files=[str(file)], template="plain")


def test_an_answer_is_the_text_of_the_value_that_the_file_has(tmp_path: Path, tokenizer: Any) -> None:
    cells = [
        pyarrow.array([value], kind)
        for value, kind in (
            (72, "int64"),
            (0.1, "float32"),
            (Decimal("1.50"), pyarrow.decimal128(5, 2)),
            (b"b", "binary"),
            (2**64 - 1, "uint64"),
            ("007", pyarrow.string_view()),
        )
    ]
    answers = []
    for number, cell in enumerate(cells):
        file = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"question": ["1"], "answer": cell}), file)
        answers += load_prompts(tokenizer, files=[str(file)], template="plain").column("answer")
    assert answers == ["72", "0.1", "1.50", "b", "18446744073709551615", "007"]


def test_nan_is_no_value_where_there_is_a_default() -> None:
    assert column(float("nan"), {"type": "float32", "default": 0.5}) == 0.5
    assert column(None, {"type": "text", "default": ""}) == ""


def test_numbers_out_of_range_are_found_before_the_first_batch(tmp_path: Path, tokenizer: Any) -> None:
    """Of a set whose last row alone is wrong, though the first batch would be the first rows."""
    rows = [{**row, "seed": 2**70 if n == 6 else n} for n, row in enumerate(QUESTIONS)]
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    options: dict[str, Any] = {"files": [str(tmp_path / "rows.jsonl")], "template": "plain", "shuffle": False}
    with pytest.raises(DataError, match=r"rows\.jsonl:7: 'seed' is no int64, but .*; it is beyond 64 bits"):
        prompts(tokenizer, context(), batch=1, columns={"seed": "int64"}, **options)


# --- JSON lines and JSON


def test_json_keeps_each_value_as_it_is_written(tmp_path: Path) -> None:
    """Dates, numbers beside fractions, large numbers, types that change late: datasets changes them all."""
    values = ["2024-01-01", 72, 0.5, 10**30, "0.50", True, None, {"b": 1, "a": 2}, [], "", "NaN", 1.0]
    rows = [{"x": value, "n": n} for n, value in enumerate(values)]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.json").write_text(json.dumps({"version": "1", "data": rows}))
    (tmp_path / "d.json").write_text("\n" + lines(rows))
    (tmp_path / "e.ndjson").write_text(lines(rows))
    for name in ("a.jsonl", "a.json", "b.json", "c.json", "d.json", "e.ndjson"):
        got = read(tmp_path / name, "x")
        assert got == values and [*map(type, got)] == [*map(type, values)], name
        assert list(got[7]) == ["b", "a"]


def test_places_of_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(QUESTIONS, indent=1))
    assert [place for place, _ in read_rows(str(tmp_path / "a.json"), [])][-1] == f"{tmp_path}/a.json:7"
    (tmp_path / "b.json").write_text("\n\n" + lines(QUESTIONS))
    assert next(place for place, _ in read_rows(str(tmp_path / "b.json"), [])) == f"{tmp_path}/b.json:3"


def test_one_object_is_a_row_or_holds_rows(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}]
    (tmp_path / "a.json").write_text(json.dumps({"messages": turns, "id": 1}))
    assert read(tmp_path / "a.json", "messages") == [turns]
    assert read(tmp_path / "a.json", "role") == ["user"]
    (tmp_path / "b.json").write_text(json.dumps({"messages": turns, "id": 1}, indent=2))
    assert read(tmp_path / "b.json", "messages") == [turns]


JSON = {
    '{"train": [{"x": 1}], "test": [{"x": 2}]}': ": an object with several lists of rows: train, test",
    '{"x": {"0": 1, "1": 2}}': ": an object without a list of rows, with the fields 'x'; .*orient=",
    '[{"x": 1}, 2]': ":2: int, not an object",
    '[{"x": 1}, {"y": 2}]': ":2: has no column 'x', only 'y'",
    '[{"x": 1}, {"x": ': r": not JSON: .*line 1 column",
    '[{"x": "\\ud83d"}]': ": holds '.ud83d', half of a surrogate pair",
    '"x"': ": holds str; write a list of objects",
    "": ": not JSON: Expecting value",
    '{"x": 1}\n{"x": 2\n': ":2: not JSON",
    '[{"x": 1}, {"x": NaN}, {"x": [NaN]}]': r":3: 'x' holds nan, which is not a number of JSON",
}


@pytest.mark.parametrize("text", JSON)
def test_json_that_is_not_rows_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    columns = ["y.z"] if text.startswith('{"x": {') else ["x"]
    with pytest.raises(DataError, match=rf"^{tmp_path}/rows\.json{JSON[text]}"):
        read(tmp_path / "rows.json", *columns)


def test_nan_in_a_field_that_nobody_asks_for_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1, "score": NaN}\n{"x": [Infinity], "score": 1}\n')
    rows = read_rows(str(tmp_path / "rows.jsonl"), ["x"])
    assert next(rows)[1]["x"] == 1
    with pytest.raises(DataError, match=r"rows\.jsonl:2: 'x' holds inf"):
        next(rows)


# --- CSV and TSV


def test_cells_are_the_texts_that_the_file_has(tmp_path: Path) -> None:
    """What pandas and datasets make numbers, times, true and null of."""
    cells = [
        "007",
        "1.0",
        "None",
        "NA",
        "nan",
        "2024-01-01",
        "True",
        ' a "b"',
        "x,y\tz",
        "two\nlines",
        "ä€😀",
    ]
    frame = pandas.DataFrame({"x": cells, "n": range(len(cells))})
    frame.to_csv(tmp_path / "a.csv")  # with pandas' own index, a column without a name
    frame.to_csv(tmp_path / "b.tsv", sep="\t", index=False)
    frame.to_csv(tmp_path / "c.csv", encoding="utf-8-sig", lineterminator="\r\n", index=False)
    for name in ("a.csv", "b.tsv", "c.csv"):
        assert read(tmp_path / name, "x") == cells, name
    assert [place for place, _ in read_rows(str(tmp_path / "a.csv"), ["n"])][-1] == f"{tmp_path}/a.csv:11"


def test_a_cell_is_of_the_type_that_a_column_asks_for(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(
        "question,answer,level,hard,score,tests\n"
        '1+1=,02,4,True,0.5,"[{""in"": ""1""}]"\n'
        "2+2=,4,5,false,1e-3,null\n"
        "3+3=,6,6,,,\n"
    )
    columns: dict[str, Any] = {
        "level": "int64",
        "hard": {"type": "boolean", "default": False},
        "score": {"type": "float32", "default": -1},
        "tests": {"type": "json", "default": {}},
        "raw": {"from": "level", "type": "text"},
    }
    options: dict[str, Any] = {"files": [str(file)], "batch": "all", "template": "plain"}
    out = prompts(tokenizer, context(), columns=columns, **options)
    assert out.answer == ["02", "4", "6"] and all(type(answer) is str for answer in out.answer)
    assert out.level.tolist() == [4, 5, 6] and out.raw == ["4", "5", "6"]
    assert out.hard.tolist() == [True, False, False]
    assert out.score.tolist() == pytest.approx([0.5, 1e-3, -1])
    assert out.tests == [[{"in": "1"}], {}, {}]
    for where in ({"level": [4, 6]}, {"level": ["4", "6"]}, {"question": ["1+1=", "3+3="]}):
        assert prompts(tokenizer, context(), where=where, **options).answer == ["02", "6"]
    assert prompts(tokenizer, context(), where={"hard": True}, **options).answer == ["02"]
    with pytest.raises(DataError, match=r"rows\.csv:2: 'score' is no int64, but '1e-3'"):
        prompts(
            tokenizer,
            context(),
            columns={"score": {"type": "int64", "default": 0}},
            where={"level": 5},
            **options,
        )


TABLES = {
    "x,y\n1,2\n1,2,3\n": r":2: has 3 cells, and the header 2; put a cell that has a ','",
    "x,y\n1,2\n1\n": ":2: has 1 cells, and the header 2",
    'x,y\n"1,2\n': r", line 2: can't be read as a table: unexpected end of data",
    "x,x\n1,2\n": ": has two columns 'x'; rename one",
    "x;y\n1;2\n": ": has no column 'x', only 'x;y'",
    "y\n1\n": ": has no column 'x', only 'y'",
}


@pytest.mark.parametrize("text", TABLES)
def test_a_table_that_is_not_one_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DataError, match=rf"^{tmp_path}/rows\.csv{TABLES[text]}"):
        read(tmp_path / "rows.csv", "x")


@pytest.mark.parametrize("data", [b"x,y\n\xe4,1\n", "x,y\n1,2\n".encode("utf-16")])
def test_a_table_that_is_not_utf_8_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rows.csv").write_bytes(data)
    with pytest.raises(DataError, match=r"rows\.csv, line \d: is not UTF-8 \(byte 0x.. at 1\); convert"):
        read(tmp_path / "rows.csv", "x")


def test_a_header_alone_has_no_rows_and_a_long_cell_is_read(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.csv").write_text("question,answer\n")
    with pytest.raises(DataError, match=r"a\.csv: no rows"):
        load_prompts(tokenizer, files=[str(tmp_path / "a.csv")], template="plain")
    (tmp_path / "b.csv").write_text(f"x\n{'y' * 300_000}\n")
    assert read(tmp_path / "b.csv", "x") == ["y" * 300_000]


# --- compressed files


def arrow_packed(name: str) -> Any:
    def pack(data: bytes) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, name) as packed:
            packed.write(data)
        return sink.getvalue().to_pybytes()

    return pack


PACKED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": arrow_packed("zstd"),
    ".lz4": arrow_packed("lz4"),
}


@pytest.mark.parametrize("suffix", PACKED)
def test_a_compressed_file_is_the_file(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(3000)]
    texts = {
        "a.jsonl": lines(rows),
        "b.json": json.dumps(rows),
        "c.csv": "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows),
    }
    for name, text in texts.items():
        file = tmp_path / f"{name}{suffix}"
        file.write_bytes(PACKED[suffix](text.encode()))
        assert read(file, "question") == [row["question"] for row in rows], name
        assert [*read_rows(str(file), ["answer"])][-1][0] == f"{file}:3000"
    whole = PACKED[suffix](texts["a.jsonl"].encode())
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(whole + whole)
    assert len(read(file, "question")) == 6000, "several streams in one file"
    for broken in (whole[: len(whole) // 2], b"not packed at all" * 20):
        file.write_bytes(broken)
        with pytest.raises(
            DataError, match=rf"^{file}: can't be decompressed: .*; fetch or compress it again"
        ):
            read(file, "question")
    out = load_prompts(tokenizer, files=[str(tmp_path / f"c.csv{suffix}")], template="plain")
    assert out.by_source.keys() == {"c"} and out.place(2999) == f"{tmp_path}/c.csv{suffix}:3000"


def test_what_is_not_read_says_what_is(tmp_path: Path) -> None:
    for name in ("rows.txt", "rows.zip", "rows", "rows.xlsx", "rows.gz", "rows.jsonl.zip", "rows.tar.gz"):
        (tmp_path / name).write_text("x")
        with pytest.raises(DataError, match=rf"{name}: is not of a kind that is read; .*\.jsonl.*\.zst"):
            read(tmp_path / name, "x")
    (tmp_path / "rows.parquet.gz").write_text("x")
    with pytest.raises(
        DataError, match=r"compressed as a whole, and \.parquet can't be read so; decompress it"
    ):
        read(tmp_path / "rows.parquet.gz", "x")


# --- several files by a pattern


def test_a_pattern_is_its_files_by_name(tmp_path: Path, tokenizer: Any) -> None:
    for number in (2, 0, 1):
        (tmp_path / f"train-{number}.jsonl").write_text(lines(QUESTIONS[2 * number : 2 * number + 2]))
    (tmp_path / ".hidden.jsonl").write_text("no JSON")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.jsonl").write_text(lines(QUESTIONS[6:]))
    data = load_prompts(tokenizer, files=[f"{tmp_path}/*.jsonl"], template="plain")
    assert data.column("question") == [row["question"] for row in QUESTIONS[:6]]
    assert data.place(3) == f"{tmp_path}/train-1.jsonl:2" and data.by_source.keys() == {"train-0"}
    assert len(load_prompts(tokenizer, files=[f"{tmp_path}/**/*.jsonl"], template="plain")) == 7
    assert len(load_prompts(tokenizer, files={"s": [f"{tmp_path}/train-[01].jsonl"]}, template="plain")) == 4
    (tmp_path / "train-3.jsonl").write_text(lines(QUESTIONS))
    assert len(load_prompts(tokenizer, files=[f"{tmp_path}/*.jsonl"], template="plain")) == 13, "as it is now"


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text(lines(QUESTIONS))
    assert matching(f"{tmp_path}/a[1].jsonl") == [f"{tmp_path}/a[1].jsonl"]
    assert matching("https://host/rows.jsonl?x=*") == ["https://host/rows.jsonl?x=*"]


def test_a_pattern_without_files_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"\*\.parquet: no file has such a name; give a file of"):
        load_prompts(tokenizer, files=[f"{tmp_path}/*.parquet"], template="plain")
    parquet(tmp_path, ["a"])
    with pytest.raises(DataError, match=rf"holds no data set; name its files, as {tmp_path}/\*\.parquet"):
        read(tmp_path, "x")


def test_a_pattern_goes_to_a_file_system_by_url(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    try:
        for number in range(2):
            system.pipe(
                f"memory://of-a-pattern/{number}.jsonl", lines(QUESTIONS[number : number + 1]).encode()
            )
        data = load_prompts(tokenizer, files=["memory://of-a-pattern/*.jsonl"], template="plain")
        assert data.column("question") == ["0+0=", "1+1="]
        assert data.place(1).endswith("of-a-pattern/1.jsonl:1") and data.place(1).startswith("memory://")
    finally:
        system.store.clear()


# --- what is never done


def test_no_code_of_a_data_set_is_run_and_nothing_is_asked_of_the_net(tmp_path: Path) -> None:
    """In a process of its own, without a net, a home that can be written, or a bar of progress."""
    folder = tmp_path / "set"
    datasets.Dataset.from_list(QUESTIONS).save_to_disk(folder)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    for name in ("set.py", "__init__.py", "dataset.py", "setup.py"):
        (folder / name).write_text(code)
    home = tmp_path / "home"
    home.mkdir()
    script = f"""
import socket, sys
def refuse(*args, **options):
    raise SystemExit("asks the net")
socket.socket.connect = socket.getaddrinfo = refuse
from rlgraph.nodes.support.data_file import read_rows
assert len(list(read_rows({str(folder)!r}, ["question"]))) == 7
assert "datasets" in sys.modules
"""
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "RLGRAPH_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "ran").exists()
    assert [*home.rglob("*")] == [], "nothing is written outside the cache"


def test_a_folder_of_a_data_set_that_is_broken_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    datasets.Dataset.from_list(QUESTIONS).save_to_disk(folder)
    (part,) = folder.glob("data-*.arrow")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(
        DataError, match=rf"^{folder}: can't be read by datasets: .*; save the data set again"
    ):
        read(folder, "question")
    (folder / "state.json").write_text("{")
    with pytest.raises(DataError, match=rf"^{folder}: can't be read by datasets"):
        read(folder, "question")


def test_files_of_text_and_parquet_do_not_load_datasets(tmp_path: Path) -> None:
    """Its import is seconds of every start, which only its own folders pay."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(QUESTIONS).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(QUESTIONS), tmp_path / "b.parquet")
    files = [str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.parquet")]
    script = (
        "import sys\nfrom rlgraph.nodes.support.data_file import read_rows\n"
        f"print(*(len(list(read_rows(file, ['question']))) for file in {files!r}), 'datasets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7", "7", "False"]


def test_where_compares_what_a_file_has_as_text_as_it_is_asked_for() -> None:
    row = next(iter(read_rows_of_csv("level,of\n4,true\n")))
    assert (
        fits("a:1", row, {"level": 4})
        and fits("a:1", row, {"level": "4"})
        and fits("a:1", row, {"level": 4.0})
    )
    assert (
        fits("a:1", row, {"of": True})
        and not fits("a:1", row, {"of": False})
        and not fits("a:1", row, {"level": 5})
    )


def read_rows_of_csv(text: str) -> list[Any]:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(text)
        file.flush()
        return [row for _, row in read_rows(file.name, [])]


def test_the_key_of_the_cache_has_the_files_of_a_pattern(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.jsonl").write_text(lines(QUESTIONS))
    before = source_of("prompts", tokenizer, [f"{tmp_path}/*.jsonl"], {})
    (tmp_path / "b.jsonl").write_text(lines(QUESTIONS))
    after = source_of("prompts", tokenizer, [f"{tmp_path}/*.jsonl"], {})
    assert before.path != after.path and [file for _, file in after.files] == [
        f"{tmp_path}/{name}.jsonl" for name in "ab"
    ]
