"""What datasets 5.2.0 does that a good guess misses, for which rlgraph reads files itself (docs/data.md)."""

from __future__ import annotations

import datetime
import gzip
import json
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not datasets.__version__.startswith("5.2."), reason="facts of datasets 5.2"),
    pytest.mark.filterwarnings("default"),
]


def load(folder: Path, kind: str, text: str, **options: Any) -> list[dict[str, Any]]:
    (folder / f"rows.{kind}").write_text(text)
    data = datasets.load_dataset(
        kind,
        data_files=str(folder / f"rows.{kind}"),
        split="train",
        cache_dir=str(folder / f"cache-{random.random()}"),
        **options,
    )
    return [dict(row) for row in data]


def lines(*values: Any) -> str:
    return "".join(json.dumps({"x": value}) + "\n" for value in values)


CHANGED: list[tuple[list[Any], list[Any]]] = [
    (["2024-01-01", "2024-05-06"], [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 5, 6)]),
    ([72, 0.5], [72.0, 0.5]),
    ([10**30, 1], [1e30, 1.0]),
    ([72, "0.50"], [72, 0.5]),
]


@pytest.mark.parametrize(("written", "read"), CHANGED)
def test_json_lines_change_their_values(tmp_path: Path, written: list[Any], read: list[Any]) -> None:
    values = [row["x"] for row in load(tmp_path, "json", lines(*written))]
    assert values == read and [*map(type, values)] == [*map(type, read)]


def test_keys_of_mappings_take_the_order_of_the_first_row(tmp_path: Path) -> None:
    rows = load(tmp_path, "json", lines({"b": 1, "a": 2}, {"a": 1, "b": 2}))
    assert [[*row["x"]] for row in rows] == [["b", "a"], ["b", "a"]]


@pytest.mark.parametrize("last", [{"x": "word"}, {"x": 0.5}, {"x": 1, "new": 3}])
def test_a_type_or_key_that_comes_late_is_an_error_without_a_line(
    tmp_path: Path, last: dict[str, Any]
) -> None:
    rows = [{"x": n, "fill": "y" * 1000} for n in range(12_000)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"fill": "", **last}])
    with pytest.raises(datasets.exceptions.DatasetGenerationError) as error:
        load(tmp_path, "json", text)
    assert "12001" not in str(error.value) and "12001" not in str(error.value.__cause__)


def test_cells_of_csv_change_type_and_place(tmp_path: Path) -> None:
    assert load(tmp_path, "csv", "q,a\nx,007\ny,1.0\n") == [{"q": "x", "a": 7.0}, {"q": "y", "a": 1.0}]
    assert load(tmp_path, "csv", "q,a\nx,None\ny,1\n")[0] == {"q": "x", "a": None}
    features = datasets.Features({name: datasets.Value("string") for name in ("q", "a")})
    exact = {"features": features, "keep_default_na": False}
    assert load(tmp_path, "csv", "q,a\nx,007\ny,None\n", **exact) == [
        {"q": "x", "a": "007"},
        {"q": "y", "a": "None"},
    ]
    assert load(tmp_path, "csv", "q,a\nx,1,2\ny,1\n", **exact) == [{"q": "1", "a": "2"}, {"q": "1", "a": ""}]


@pytest.mark.parametrize(
    "kind",
    [pyarrow.map_(pyarrow.string(), pyarrow.int64()), pyarrow.list_view(pyarrow.int64()), pyarrow.uuid()],
)
def test_parquet_with_some_types_is_refused(tmp_path: Path, kind: Any) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"x": pyarrow.nulls(1, kind)}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="does not have a datasets dtype equivalent"):
        datasets.load_dataset(
            "parquet", data_files=str(tmp_path / "rows.parquet"), split="train", cache_dir=str(tmp_path / "c")
        )


def test_fields_that_differ_are_texts_of_json_on_disk(tmp_path: Path) -> None:
    """Whoever reads the file without the type gets a text where a mapping is meant."""
    (tmp_path / "rows.jsonl").write_text(lines({"a": 1}, {"b": "two"}))
    data = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    data.to_parquet(tmp_path / "rows.parquet")
    raw = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert raw.schema.field("x").type.extension_name == "arrow.json"
    assert [json.loads(value) for value in raw["x"].to_pylist()] == [{"a": 1}, {"b": "two"}]
    union = datasets.Dataset.from_list([{"x": {"a": 1}}, {"x": {"b": "two"}}])
    assert union[0]["x"] == {"a": 1, "b": None}, "from_list makes a struct of all keys"


def test_interleaving_draws_each_row(tmp_path: Path) -> None:
    sources = [datasets.Dataset.from_dict({"s": [n] * 3000}) for n in range(2)]
    mixed = datasets.interleave_datasets(sources, probabilities=[0.75, 0.25], seed=0)
    counts = [sum(mixed[at : at + 1000]["s"]) for at in (0, 1000, 2000)]
    assert counts != [250] * 3 and all(200 < count < 300 for count in counts)


def test_load_from_disk_writes_nothing_and_maps_the_file(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"x": 1}]).save_to_disk(tmp_path / "set")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()}
    assert datasets.load_from_disk(tmp_path / "set")[0] == {"x": 1}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()} == before


def test_pyarrow_says_where_a_compressed_stream_is_cut_off(tmp_path: Path) -> None:
    whole = gzip.compress(b"x" * 1000)
    (tmp_path / "x.gz").write_bytes(whole[:-9])
    with pytest.raises(OSError, match="Truncated compressed stream"):
        pyarrow.input_stream(str(tmp_path / "x.gz"), compression="gzip").read()
