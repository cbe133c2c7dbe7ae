"""Where rows come from: saved data sets, URLs, filters, several sources by weight, conversations."""

from __future__ import annotations

import fcntl
import gzip
import json
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import numpy
import pytest

from flattened import flattened
from quiet_server import QuietServer
from recorded import means
from rlgraph.ir.schedules import ValueSchedule
from rlgraph.nodes.data.pairs import pairs
from rlgraph.nodes.data.prompts import examples, prompts
from rlgraph.nodes.support import data_file
from rlgraph.nodes.support.data_file import DataError
from rlgraph.nodes.support.dataset import load_prompts
from rlgraph.nodes.support.mixture import BLOCK, SourceWeights, mixture_of, pick_mixed
from rlgraph.ops import Context
from rlgraph.runtime.demo import make_tokenizer

FALL, RISE = (ValueSchedule("linear", ((1, a), (11, b))) for a, b in ((1.0, 0.0), (0.0, 1.0)))
SLOW = ValueSchedule("cosine", ((1, 1.0), (400, 0.1)))
ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3, "of": "xy"[i % 2]} for i in range(7)]
TEMPLATE = (
    "{% for m in messages %}{{ '=' if m.role == 'assistant' else m.role[0] + ':' }}"
    "{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}={% endif %}{% if thinking %}?{% endif %}"
)

prompts, examples, pairs = flattened(prompts), flattened(examples), flattened(pairs)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = make_tokenizer()
    made.name_or_path = "characters"
    return made


@pytest.fixture(scope="module")
def chatty() -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code - 31 for code in range(32, 127)} | {"<eos>": 0}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", name_or_path="chatty-options", chat_template=TEMPLATE
    )


def jsonl(directory: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    file = directory / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def saved(folder: Path, *parts: list[dict[str, Any]]) -> str:
    """A folder as ``datasets.Dataset.save_to_disk`` writes it, a file for each part."""
    import datasets

    whole = datasets.concatenate_datasets([datasets.Dataset.from_list(rows) for rows in parts])
    whole.save_to_disk(folder, num_shards=len(parts))
    assert len([*folder.glob("data-*.arrow")]) == len(parts)
    return str(folder)


def context(position: int = 0, seed: int = 5) -> Context:
    return Context(node="prompts", seed=seed, iteration=0, position=position)


def asked(tokenizer: Any, position: int = 0, **options: Any) -> list[str]:
    return prompts(tokenizer, context(position), **{"template": "plain", **options}).question


def test_a_saved_data_set_is_read_part_after_part(tmp_path: Path, tokenizer: Any) -> None:
    folder = saved(tmp_path / "set", ROWS[:3], ROWS[3:])
    data = load_prompts(tokenizer, files=[folder], template="plain")
    assert data.column("question") == [row["question"] for row in ROWS]
    assert data.place(4) == f"{folder}:5"
    assert data.by_source.keys() == {"set"}


def test_what_datasets_itself_saves_is_read(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    whole = datasets.Dataset.from_list(ROWS)
    whole.filter(lambda row: row["level"]).save_to_disk(tmp_path / "set", num_shards=2)
    assert asked(tokenizer, files=[str(tmp_path / "set")], batch="all") == [
        row["question"] for row in ROWS if row["level"]
    ]
    datasets.DatasetDict(train=whole).save_to_disk(tmp_path / "splits")
    assert len(asked(tokenizer, files=[str(tmp_path / "splits/train")], batch="all")) == 7


@pytest.mark.parametrize("case", ["splits", "empty", "column"])
def test_a_folder_that_is_no_data_set_is_named(tmp_path: Path, tokenizer: Any, case: str) -> None:
    folder, options = tmp_path / "set", {}
    if case == "column":
        saved(folder, ROWS)
        options = {"question": "problem"}
    else:
        folder.mkdir()
    if case == "splits":
        (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    said = {
        "splits": f"several splits; name one of {folder}/train, {folder}/test",
        "empty": "is a folder that holds no data set",
        "column": "has no column 'problem', only 'question', 'answer', 'level', 'of'; name one of them",
    }[case]
    with pytest.raises(DataError) as error:
        asked(tokenizer, files=[str(folder)], batch=1, **options)
    assert said in str(error.value)


def test_where_keeps_rows_by_value_and_counts_the_others(tmp_path: Path, tokenizer: Any) -> None:
    ctx = context()
    where = {"level": [1, 2], "of": "x"}
    file = jsonl(tmp_path, [*ROWS, {"question": "1" * 9, "answer": "", "level": 1, "of": "x"}])
    out = prompts(
        tokenizer, ctx, files=[file], batch="all", template="plain", where=where, max_prompt_tokens=4
    )
    assert out.question == ["2+2=", "4+4="]
    assert means(ctx) == {"data/filtered": (5.0, 8), "data/overlong": (1.0, 3)}


def test_where_that_keeps_nothing_says_what_there_is(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"no row is where level is 9; it is 0, 1, 2"):
        asked(tokenizer, files=[jsonl(tmp_path, ROWS)], batch=1, where={"level": 9})


def test_each_row_carries_its_source(tmp_path: Path, tokenizer: Any) -> None:
    files = {"small": [jsonl(tmp_path, ROWS[:2], "a.jsonl")], "large": [jsonl(tmp_path, ROWS, "b.jsonl")]}
    out = prompts(tokenizer, context(), files=files, batch="all", template="plain")
    assert out.source == ["small"] * 2 + ["large"] * 7
    out = prompts(tokenizer, context(), files=files, batch=9, template="plain")
    assert Counter(out.source) == {"small": 2, "large": 7}, "without weights an epoch has every row once"
    assert prompts(tokenizer, context(), files=files["small"], batch=1, template="plain").source == ["a"]


def by_source(sources: list[str]) -> dict[str, list[int]]:
    return {name: [row for row, other in enumerate(sources) if other == name] for name in sources}


def test_sources_have_their_shares_and_epochs_of_their_own() -> None:
    sources, weights = ["a"] * 7 + ["b"] * 50 + ["c"] * 3, SourceWeights((2, 1, 1))
    rows = pick_mixed(by_source(sources), weights, 3 * BLOCK, 0, 3, shuffle=True)
    for block in range(3):
        found = Counter(sources[row] for row in rows[block * BLOCK : (block + 1) * BLOCK])
        assert found == {"a": 500, "b": 250, "c": 250}
    mine = [row for row in rows if sources[row] == "a"]
    epochs = [tuple(mine[at : at + 7]) for at in range(0, len(mine) - 7, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(epochs)) > 100, "each epoch has an order of its own"


@pytest.mark.parametrize(
    "mixture", [SourceWeights((1, 4)), SourceWeights((SLOW, 4), 8), SourceWeights((SLOW, RISE), 8)]
)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("sizes", [[1] * 40, [7, 13, 1, 19], [40], [BLOCK + 3, 5, 2 * BLOCK]])
def test_a_mixed_batch_depends_on_seed_and_position_alone(
    shuffle: bool, sizes: list[int], mixture: SourceWeights
) -> None:
    sources = ["a"] * 3 + ["b"] * 11
    straight = pick_mixed(by_source(sources), mixture, sum(sizes), 990, 5, shuffle)
    cut, at = [], 990
    for size in sizes:
        cut += pick_mixed(by_source(sources), mixture, size, at, 5, shuffle)
        at += size
    assert cut == straight
    assert straight != pick_mixed(by_source(sources), mixture, sum(sizes), 990, 6, shuffle)


def test_resuming_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, tokenizer: Any) -> None:
    files = {"a": [jsonl(tmp_path, ROWS[:3], "a.jsonl")], "b": [jsonl(tmp_path, ROWS[3:], "b.jsonl")]}
    options = {"files": files, "weights": {"a": 1, "b": 2}}
    whole = asked(tokenizer, batch=24, **options)
    assert asked(tokenizer, batch=10, **options) + asked(tokenizer, 10, batch=14, **options) == whole


def test_pairs_and_examples_mix_alike(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{**row, "chosen": "1", "rejected": "2"} for row in ROWS]
    files = {"a": [jsonl(tmp_path, rows[:3], "a.jsonl")], "b": [jsonl(tmp_path, rows[3:], "b.jsonl")]}
    options = {"files": files, "weights": {"a": 1, "b": 2}, "template": "plain", "where": {"of": "x"}}
    two = pairs(tokenizer, context(8), batch=6, **options).tokens.tolist()[::2]
    one = examples(tokenizer, context(4), batch=6, answer="chosen", **options).tokens.tolist()
    assert two == one


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": 1}, "weights are for a, and files has a, b"),
        ({"a": 1, "c": 1}, "weights are for a, c, and files has a, b"),
        ({"a": 1, "b": 5000}, "less than 1 row in 1000"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: dict[str, float], said: str) -> None:
    with pytest.raises(DataError, match=said):
        mixture_of(["a", "b"], weights, {}, 4)


@pytest.mark.parametrize(
    "weights", [(1, 1, 1), (0.7, 0.1, 0.05, 0.123), (1e-9, 1), (FALL, RISE), (FALL, RISE, 3)]
)
@pytest.mark.parametrize("span", [1, 8, BLOCK])
def test_shares_add_up_and_roundings_cancel_out(weights: tuple[Any, ...], span: int) -> None:
    mixture = SourceWeights(weights, span)
    quotas = mixture.quotas(range(300))
    assert (quotas >= 0).all() and (quotas.sum(1) == span).all()
    now = [[w if isinstance(w, int | float) else w.at(1 + n) for w in weights] for n in range(300)]
    exact = sum(span * numpy.array(row) / sum(row) for row in now)
    assert abs(quotas.sum(0) - exact).max() < 6
    assert mixture.given(300 * span).tolist() == quotas.sum(0).tolist()
    assert mixture.given(2500 * span).tolist() == mixture.quotas(range(2500)).sum(0).tolist()


def test_weights_with_a_course_are_those_of_the_iteration_in_which_a_row_comes() -> None:
    mixture = mixture_of(["a", "b"], {"a": 1.0, "b": 1.0}, {"weights.a": FALL, "weights.b": RISE}, 8)
    rows = pick_mixed({"a": range(5), "b": range(5, 12)}, mixture, 30 * 8, 0, 0, shuffle=True)
    share = [sum(row < 5 for row in rows[at : at + 8]) for at in range(0, 240, 8)]
    assert share[0] == 8 and share[5] == 4 and share[10:] == [0] * 20
    mine = [row for row in rows if row < 5]
    assert sorted(mine[:5]) == list(range(5)), "epochs of its own go on"


def test_template_options_reach_the_chat_template(tmp_path: Path, chatty: Any) -> None:
    options = {"files": [jsonl(tmp_path, [{"question": "a", "answer": "d"}])], "batch": 1}

    def rendered(**more: Any) -> str:
        ids = prompts(chatty, context(), **options, **more).prompt[0].tolist()
        return "".join(chatty.convert_ids_to_tokens(ids))

    assert rendered(template_options={"thinking": False}) == "u:a ="
    assert rendered(template_options={"thinking": True}) == "u:a =?"
    assert rendered(template_options={"chat_template": "{{ messages[0].content }}!"}) == "a!"


def test_an_example_may_be_a_conversation(tmp_path: Path, chatty: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = jsonl(tmp_path, [{"messages": messages}])
    out = examples(chatty, context(), files=[file], batch=1, question="messages", answer=None, system="s")
    assert "".join(chatty.convert_ids_to_tokens(out.tokens[0].tolist())) == "s:s u:a =b <eos>"
    assert out.loss_mask[0].tolist() == [False] * 9 + [True] * 3
    file = jsonl(tmp_path, [{"messages": messages[1:]}], "one.jsonl")
    with pytest.raises(DataError, match="nothing before the assistant's turn"):
        examples(chatty, context(), files=[file], batch=1, question="messages", answer=None)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """fsspec's file system in memory, and an empty cache."""
    import fsspec

    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_a_url_is_copied_once(memory: Any, tmp_path: Path, tokenizer: Any) -> None:
    url = f"memory://{tmp_path.name}/rows.jsonl"
    memory.pipe(url, Path(jsonl(tmp_path, ROWS)).read_bytes())
    assert asked(tokenizer, files=[url], batch=3, shuffle=False) == ["0+0=", "1+1=", "2+2="]
    memory.rm(url)
    assert asked(tokenizer, 3, files=[url], batch=1, shuffle=False) == ["3+3="]
    copies = [*(tmp_path / "cache").rglob("*.jsonl")]
    assert [copy.name for copy in copies] == ["rows.jsonl"], "one whole copy, and nothing beside it"
    assert load_prompts(tokenizer, files=[url], template="plain").place(0) == f"{url}:1"


def test_threads_that_ask_for_a_url_fetch_it_once(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("memory://shared/rows.jsonl", b"{}")
    fetched, get, begun = list[str](), type(memory).get_file, Barrier(3)

    def slow(system: Any, path: str, *args: Any, **options: Any) -> None:
        fetched.append(path)
        get(system, path, *args, **options)

    def ask(_: int) -> str:
        begun.wait()
        return data_file._fetched.__wrapped__("memory://shared/rows.jsonl")

    monkeypatch.setattr(type(memory), "get_file", slow)
    with ThreadPoolExecutor(3) as threads:
        (copy,) = {*threads.map(ask, range(3))}
    assert Path(copy).read_bytes() == b"{}" and len(fetched) == 1


@contextmanager
def served(*pieces: bytes, every: float, last: bool) -> Iterator[str]:
    """A server that sends a file piece by piece, and its end or not; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()
            for piece in pieces:
                ended.wait(every)
                with suppress(OSError):  # who asked has gone
                    self.wfile.write(piece)
                    self.wfile.flush()
            if not last:
                ended.wait()

        def answer(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(sum(map(len, pieces)) + (not last)))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    ended = Event()
    with QuietServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/rows.jsonl"
        finally:
            ended.set()
            server.shutdown()


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data_file, "FETCH_SECONDS", 2.0)
    monkeypatch.setattr(data_file, "FETCH_BYTES", 2000)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("pieces", [[], [b" "] * 60], ids=["silent", "dripping"])
def test_a_server_that_gives_a_file_no_end_is_named(tokenizer: Any, pieces: list[bytes]) -> None:
    since = time.monotonic()
    with served(*pieces, every=0.2, last=False) as url, pytest.raises(DataError) as error:
        asked(tokenizer, files=[url], batch=1)
    assert time.monotonic() - since < 30
    assert f"{url}: can't be fetched: " in str(error.value) and "copy the file here" in str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_slow_and_gets_on_is_waited_for(tokenizer: Any) -> None:
    row = json.dumps({"question": "1+1=", "answer": "2", "rest": "x" * 8000}).encode() + b"\n"
    since = time.monotonic()
    with served(*[row] * 7, every=0.6, last=True) as url:
        assert asked(tokenizer, files=[url], batch=2, shuffle=False) == ["1+1=", "1+1="]
    assert time.monotonic() - since > 4, "twice as long as nothing may come"


def test_who_waits_for_a_copy_that_another_process_makes_is_told(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_file, "FETCH_SECONDS", 1.0)
    memory.pipe("memory://held/rows.jsonl", b"{}")
    copies = tmp_path / "cache" / "data"
    with pytest.MonkeyPatch.context() as interrupted:
        interrupted.setattr(type(memory), "get_file", None)  # so that its lock is there, and nothing else
        with pytest.raises(DataError, match="can't be fetched: TypeError"):
            data_file._fetched.__wrapped__("memory://held/rows.jsonl")
    (lock,) = copies.glob("*.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="can't be fetched: TimeoutError: 0 bytes came in 1 s"):
            data_file._fetched.__wrapped__("memory://held/rows.jsonl")


def test_a_saved_data_set_is_fetched_whole(memory: Any, tmp_path: Path, tokenizer: Any) -> None:
    folder = Path(saved(tmp_path / "set", ROWS[:3], ROWS[3:]))
    url = f"memory://{tmp_path.name}/set"
    for file in folder.iterdir():
        memory.pipe(f"{url}/{file.name}", file.read_bytes())
    assert asked(tokenizer, files=[url], batch="all") == [row["question"] for row in ROWS]


def test_a_file_url_is_the_file(tmp_path: Path, tokenizer: Any) -> None:
    assert len(asked(tokenizer, files=[f"file://{jsonl(tmp_path, ROWS)}"], batch="all")) == 7


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://nowhere/rows.jsonl", "there is no such file"),
        ("nothing://a/rows.jsonl", "Protocol not known: nothing"),
        ("file:///nowhere/rows.jsonl", "there is no such file"),
    ],
)
def test_a_url_that_leads_nowhere_is_named(tokenizer: Any, url: str, said: str) -> None:
    with pytest.raises(DataError) as error:
        asked(tokenizer, files=[url], batch=1)
    assert url in str(error.value) and said in str(error.value)


def test_a_protocol_that_needs_a_package_names_it(tokenizer: Any) -> None:
    import importlib.util

    if importlib.util.find_spec("dropboxdrivefs"):
        pytest.skip("the package is here")
    with pytest.raises(DataError, match=r"dropbox:// needs a package that is not here: .*dropboxdrivefs"):
        asked(tokenizer, files=["dropbox://a/rows.jsonl"], batch=1)


def test_the_epoch_is_where_the_data_stand(tmp_path: Path, tokenizer: Any) -> None:
    options: dict[str, Any] = {"files": [jsonl(tmp_path, ROWS)], "template": "plain"}

    def epoch(source: Any, position: int, **more: Any) -> dict[str, float]:
        ctx = context(position)
        source(tokenizer, ctx, **options, **more)
        return {name: total / count for name, (total, count) in means(ctx).items()}

    assert epoch(prompts, 0, batch=7) == epoch(prompts, 4, batch=3) == {"data/epoch": 1.0}
    assert epoch(examples, 7, batch=7) == {"data/epoch": 2.0}
    assert epoch(prompts, 0, batch="all") == {}
    assert epoch(prompts, 0, batch=2, where={"of": "x"})["data/epoch"] == 2 / 4
    two = {"chosen": "answer", "rejected": "of"}
    assert epoch(pairs, 14, batch=7, **two) == {"data/epoch": 2.0}, "a pair is two rows of the position"
    options["files"] = {
        "a": [jsonl(tmp_path, ROWS[:2], "a.jsonl")],
        "b": [jsonl(tmp_path, ROWS[2:], "b.jsonl")],
    }
    own = {"data/epoch/a": 0.75 * 8 / 2, "data/epoch/b": 0.25 * 8 / 5}
    assert epoch(prompts, 4, batch=4, weights={"a": 3, "b": 1}) == own


class Pages(SimpleHTTPRequestHandler):
    """Files of a folder over HTTP; /moved leads to another one, and /private is for nobody."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(super().do_HEAD)

    def do_GET(self) -> None:
        self._answer(super().do_GET)

    def _answer(self, of_a_file: Callable[[], None]) -> None:
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", "/rows.jsonl")
            self.end_headers()
        elif self.path.startswith("/private"):
            self.send_error(401)
        else:
            of_a_file()


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with rows.jsonl, a name with a space, a compressed file and a page."""
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "served"
    folder.mkdir()
    rows = Path(jsonl(folder, ROWS)).read_bytes()
    (folder / "more rows.jsonl").write_bytes(rows)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(rows))
    (folder / "page.jsonl").write_text("<html>Sign in</html>")
    server = QuietServer(("127.0.0.1", 0), partial(Pages, directory=str(folder)))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    "name",
    [
        "rows.jsonl",
        "more%20rows.jsonl",
        "rows.jsonl.gz",
        "rows.jsonl?download=true",
        "rows.jsonl?a[0]=*",
        "moved.jsonl",
    ],
)
def test_files_on_the_web_are_read(name: str, web: str, tokenizer: Any) -> None:
    assert asked(tokenizer, files=[f"{web}/{name}"], batch="all") == [row["question"] for row in ROWS]
    data = load_prompts(tokenizer, files=[f"{web}/{name}"], template="plain")
    assert data.place(0) == f"{web}/{name}:1"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.jsonl", "there is no such file (404"),
        ("*.jsonl", "there is no such file (404"),
        ("private.jsonl", "can't be fetched: ClientResponseError: 401"),
        ("page.jsonl", "page.jsonl:1: not JSON"),
        ("", "names no file"),
    ],
)
def test_what_is_not_on_the_web_is_named(name: str, said: str, web: str, tokenizer: Any) -> None:
    with pytest.raises(DataError) as error:
        asked(tokenizer, files=[f"{web}/{name}"], batch=1)
    assert f"{web}/{name}" in str(error.value) and said in str(error.value)


def test_a_server_that_does_not_answer_is_named(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:1/a\.jsonl: .*Cannot connect"):
        asked(tokenizer, files=["http://127.0.0.1:1/a.jsonl"], batch=1)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_patterns_mean_files_in_an_archive(
    kind: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    for number, name in enumerate(("a.jsonl", "b.jsonl", "deep/c.jsonl")):
        Path(jsonl(folder, ROWS[number : number + 1])).rename(folder / name)
    names = ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    archive = tmp_path / f"all.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as packed:
            for name in names:
                packed.write(folder / name, name)
    else:
        with tarfile.open(archive, "w") as tape:
            for name in names:
                tape.add(folder / name, name)

    def questions(pattern: str) -> list[str]:
        return asked(tokenizer, files=[f"{kind}://{pattern}::file://{archive}"], batch="all")

    right = [row["question"] for row in ROWS]
    assert questions("*.jsonl") == right[:2] and questions("**/*.jsonl") == right[:3]
    assert questions("b.jsonl") == right[1:2] and questions("deep/?.jsonl") == right[2:3]
    data = load_prompts(tokenizer, files=[f"{kind}://*.jsonl::file://{archive}"], template="plain")
    assert data.place(1) == f"{kind}://b.jsonl::file://{archive}:1"
    with pytest.raises(DataError, match="no file has such a name"):
        questions("*.parquet")


def test_patterns_of_file_urls_mean_files_here(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "a folder"
    (folder / "deep").mkdir(parents=True)
    for number, name in enumerate(("a.jsonl", "b[1].jsonl", "deep/c.jsonl")):
        Path(jsonl(folder, ROWS[number : number + 1])).rename(folder / name)
    right = [row["question"] for row in ROWS]
    assert asked(tokenizer, files=[f"file://{folder}/*.jsonl"], batch="all") == right[:2]
    assert asked(tokenizer, files=[f"file://{folder}/**/*.jsonl"], batch="all") == right[:3]
    assert asked(tokenizer, files=[f"{folder}/b[1].jsonl"], batch="all") == right[1:2]
