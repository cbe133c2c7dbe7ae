"""Tokenised data on disk: made once, mapped by all, and made anew where anything is another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recorded import means
from rlgraph.nodes.data.pairs import pairs
from rlgraph.nodes.data.prompts import examples, prompts
from rlgraph.nodes.support import dataset
from rlgraph.nodes.support.data_file import DataError
from rlgraph.nodes.support.dataset import load_prompts
from rlgraph.ops import Context
from rlgraph.runtime.demo import make_tokenizer

ROWS = [
    {
        "question": f"{n}+{n}=",
        "answer": str(2 * n),
        "chosen": "1",
        "rejected": "20",
        "level": n % 3,
        "tests": [n, {"of": None}],
    }
    for n in range(50)
]


@pytest.fixture
def tokenizer() -> Any:
    made = make_tokenizer()
    made.name_or_path = "characters"
    return made


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is cached, in chunks of a few rows."""
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset, "ON_DISK", 1)
    monkeypatch.setattr(dataset, "CHUNK", 7)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "data").iterdir())


def anew() -> None:
    """Forget what this process has, as another one would begin."""
    dataset._loaded.cache_clear()


OPTIONS: dict[str, Any] = {"batch": 30, "template": "plain", "where": {"level": [0, 2]}}


@pytest.mark.parametrize("source", [prompts, examples, pairs])
def test_rows_are_the_same_from_memory_and_from_disk(
    source: Any, file: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> list[Any]:
        ctx = Context(node="data", seed=4, iteration=0, position=20)
        columns = {"tests": "json", "level": "int64"}
        out = source(tokenizer, ctx, files=[file], columns=columns, **OPTIONS)
        values = [getattr(value, "tolist", lambda value=value: value)() for value in vars(out).values()]
        return [values, means(ctx)]

    with monkeypatch.context() as memory:
        memory.setattr(dataset, "ON_DISK", 2**30)
        memory.setattr(dataset, "CHUNK", 1000)
        wanted = rows()
    anew()
    assert rows() == wanted
    anew()
    with monkeypatch.context() as once:
        once.setattr(dataset, "_write", None)
        assert rows() == wanted, "it is read from disk"


def test_what_is_cached_is_known_by_files_tokenizer_and_reading(
    file: str, tokenizer: Any, tmp_path: Path
) -> None:
    def load(**options: Any) -> int:
        anew()
        load_prompts(options.pop("tokenizer", tokenizer), files=[file], **{"template": "plain", **options})
        return len(cached(tmp_path))

    assert [load(), load(), load(max_prompt_tokens=5), load(max_prompt_tokens=5, truncate="left")] == [1] * 4
    assert load(suffix="1") == 2
    assert load(columns={"level": "int64"}) == 3
    other = make_tokenizer()
    other.name_or_path = tokenizer.name_or_path
    other.add_tokens(["+1"])
    assert load(tokenizer=other) == 4
    os.utime(file, ns=(1, 1))
    assert load() == 5
    Path(file).write_text(json.dumps(ROWS[0]) + "\n")
    os.utime(file, ns=(1, 1))
    assert load() == 6, "of the same time, but another size"


def test_what_is_not_whole_is_made_anew(file: str, tokenizer: Any, tmp_path: Path) -> None:
    wanted = load_prompts(tokenizer, files=[file], template="plain").column("ids")
    (path,) = cached(tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:8], whole[: len(whole) // 2], whole[:-9]):
        anew()
        path.write_bytes(damaged)
        assert load_prompts(tokenizer, files=[file], template="plain").column("ids") == wanted
        assert path.read_bytes() == whole


def test_what_was_interrupted_leaves_nothing(file: str, tokenizer: Any, tmp_path: Path) -> None:
    with Path(file).open("a") as rows:
        rows.write(json.dumps({"question": "", "answer": ""}) + "\n")
    with pytest.raises(DataError, match=f"{file}:51: the question has no tokens"):
        load_prompts(tokenizer, files=[file], template="plain")
    assert cached(tmp_path) == []


def test_several_processes_may_begin_at_once(file: str, tokenizer: Any, tmp_path: Path) -> None:
    program = (
        "from rlgraph.nodes.support import dataset\n"
        "from rlgraph.runtime.demo import make_tokenizer\n"
        "dataset.ON_DISK = 1\n"
        f"print(dataset.load_prompts(make_tokenizer(), files=[{file!r}], template='plain').column('ids'))\n"
    )
    begun = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)]
    said = [json.loads(one.communicate()[0]) for one in begun]
    assert said == [load_prompts(make_tokenizer(), files=[file], template="plain").column("ids")] * 3
    assert len(cached(tmp_path)) == 1


def test_a_cache_that_cannot_be_written_is_named(
    file: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "taken"))
    with pytest.raises(
        DataError, match=r"taken/data: what comes of the data can't be kept there: .*RLGRAPH_CACHE"
    ):
        load_prompts(tokenizer, files=[file], template="plain")
