"""Tokenised data on disk: made once, mapped by all, and made anew where anything is another."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flattened import flattened
from recorded import means
from rlgraph.errors import RunError
from rlgraph.nodes.data.pairs import pairs
from rlgraph.nodes.data.prompts import examples, prompts
from rlgraph.nodes.support import dataset, prepare
from rlgraph.nodes.support import process_map as module
from rlgraph.nodes.support.data_file import DataError
from rlgraph.nodes.support.dataset import load_prompts
from rlgraph.nodes.support.process_map import process_map
from rlgraph.ops import Context
from rlgraph.runtime.demo import make_tokenizer
from share import rest_nightly

prompts, examples, pairs = flattened(prompts), flattened(examples), flattened(pairs)

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
    monkeypatch.setattr(prepare, "CHUNK", 7)


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
        memory.setattr(prepare, "CHUNK", 1000)
        wanted = rows()
    anew()
    assert rows() == wanted
    anew()
    with monkeypatch.context() as once:
        once.setattr(dataset, "write_set", None)
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("source", rest_nightly([prompts, examples, pairs], lambda source: source is prompts))
def test_several_processes_prepare_the_same_file(
    source: Any, file: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for processes in (1, 3):
        anew()
        monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache" / str(processes)))
        monkeypatch.setattr(prepare, "_processes", lambda _, many=processes: many)
        source(tokenizer, Context("data", 0, 0), files=[file], columns={"tests": "json"}, **OPTIONS)
        folder = tmp_path / "cache" / str(processes) / "data"
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]


def test_a_row_that_is_wrong_is_named_whichever_process_finds_it(
    file: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_processes", lambda _: 2)
    rows = [{**row, "question": "" if n in (23, 30) else row["question"]} for n, row in enumerate(ROWS)]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=f"{file}:24: the question has no tokens"):
        load_prompts(tokenizer, files=[file], template="plain")
    assert cached(tmp_path) == []


def test_large_files_are_prepared_by_a_process_per_core(
    file: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = [dataset.source_of("prompts", tokenizer, [file], {"template": "plain"})]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    assert prepare._processes(key) == 1
    monkeypatch.setattr(prepare, "BY_PROCESSES", 1)
    assert prepare._processes(key) == 5
    own = replace(key, tokenizer=type("Own", (), {})())
    assert prepare._processes(own) == 1, "it may be no tokenizer that another process can have"


@pytest.mark.parametrize(("function", "item", "said"), [(os._exit, 3, "3"), (signal.raise_signal, 9, "-9")])
def test_a_process_that_is_killed_ends_the_preparation(function: Any, item: int, said: str) -> None:
    with pytest.raises(RunError, match=f"a process that prepares data ended with {said}"):
        list(process_map(function, [item] * 9, 2))


def test_an_interrupt_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], module._started

    def kept() -> Any:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(module, "_started", kept)
    main = threading.main_thread().ident
    threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        list(process_map(time.sleep, [600] * 9, 2))
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_results_are_in_order_and_errors_are_the_function_s() -> None:
    assert list(process_map(math.sqrt, range(50), 3)) == [math.sqrt(n) for n in range(50)]
    results = process_map(math.sqrt, [4, 9, -1, -2], 2)
    assert [next(results), next(results)] == [2, 3]
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        next(results)
    assert list(process_map(print, [1], 1)) == [None], "what it prints is no answer"


class TwoWords(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}, {second}")


def test_an_error_that_cannot_be_pickled_comes_back_as_its_words() -> None:
    same = ValueError("as it is")
    assert repr(module._picklable(same)) == repr(same)
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(TwoWords("one", "two")))
    words = pickle.loads(pickle.dumps(module._picklable(TwoWords("one", "two"))))
    assert isinstance(words, RunError) and str(words) == "TwoWords: one, two"
