"""Metrics and samples reach TensorBoard, W&B, MLflow, one's own and Prometheus; iterations can be traced."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.errors import RunError
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.endpoint import MetricsEndpoint, exposition
from rlgraph.runtime.rundir.trackers import IDS, VARIABLE, Trackers, Wandb, make_of, numbers_of

ONES = str(Path(__file__).parent / "ones.yaml")
FIRST = {"reward/mean": 0.5}
ROWS = [
    {"tokens": "1+2=3|<b>\n", "responses": "3", "rewards": 1.0, "truncated": False, "turns": 1},
    {"tokens": "1+2=4", "responses": "4", "rewards": None, "truncated": True, "turns": 3},
]
SECOND = {"reward/mean": 0.75, "time/step": 1.5, "eval/pass@8": 0.25}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graph.yaml").write_text("graph: small\n")
    return tmp_path


def tracked(names: list[str], folder: Path) -> None:
    """Two iterations, the second one after a restart."""
    trackers = Trackers(folder, "small", make_of(names))
    for step, values in ((1, FIRST), (2, SECOND)):
        trackers.samples("eval", ROWS, step)
        trackers.log(values, step)
        trackers.close(failed=step == 1)


def test_tensorboard_is_always_there(folder: Path) -> None:
    tracked([], folder)
    files = sorted((folder / "tensorboard").iterdir())
    found = b"".join(file.read_bytes() for file in files)
    assert b"reward/mean" in found and b"time/step" in found
    assert b"samples/eval/rewards" in found and rb"| 1+2=3\|&lt;b&gt;<br> | 3 | 1 | False | 1 |" in found
    assert not (folder / IDS).exists()


def test_a_service_that_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = [name for name in ("wandb", "mlflow") if importlib.util.find_spec(name) is None]
    if not absent:
        pytest.skip("all are here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=f"--track {absent[0]}: that is not installed\n  pip install"):
        run_graph(ONES, track=absent)
    assert not [*tmp_path.iterdir()]
    assert make_of([]) == {}


def test_names_of_trackers_are_checked_before_anything_starts(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("class Tracker: pass\n")
    with pytest.raises(
        RunError, match=r"there are wandb, mlflow, and my_tracker\.py:Name\n  did you mean `wandb`"
    ):
        make_of(["wandbb"])
    with pytest.raises(RunError, match=r"there is no file .*other\.py"):
        make_of([f"{tmp_path}/other.py:Tracker"])
    with pytest.raises(RunError, match=r"own\.py has no `Traker`"):
        make_of([f"{own}:Traker"])
    assert make_of([f"{own}:Tracker"])[f"{own}:Tracker"].__name__ == "Tracker"


def test_numbers_of_samples_leave_out_what_is_missing_and_texts() -> None:
    assert numbers_of(ROWS) == {"rewards": [1.0], "truncated": [0.0, 1.0], "turns": [1.0, 3.0]}


OWN = """
import json

class Tracker:
    def __init__(self, folder, graph):
        self.file = open(folder / "own.jsonl", "a")
        self.write(opened=graph)

    def write(self, **line):
        print(json.dumps(line), file=self.file, flush=True)

    def log(self, values, step):
        self.write(step=step, reward=values.get("reward/mean"))

    def samples(self, name, rows, step):
        self.write(step=step, samples=name, of=len(rows), first=rows[0])

    def close(self, failed):
        self.write(failed=failed)
        self.file.close()
"""


def test_a_tracker_of_ones_own_gets_metrics_and_samples(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    few = ("prompts.batch=2", "rollout.n=2", "schedule.iterations=2", "schedule.save_every=1")
    run_graph(ONES, few, 1, run_dir=Path("run"), inline=True, track=["own.py:Tracker"])
    told = [json.loads(line) for line in Path("run/own.jsonl").read_text().splitlines()]
    assert told[0] == {"opened": "ones"} and told[-1] == {"failed": False}
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["reward"] for line in told if "reward" in line}
    assert logged == {line["step"]: line.get("reward/mean") for line in lines}
    shown = [(line["step"], line["samples"], line["of"]) for line in told if "samples" in line]
    assert shown == [(0, "eval", 32), (1, "train", 4), (2, "train", 4), (2, "eval", 32)]
    first = json.loads(Path("run/samples/step-000001.jsonl").read_text().splitlines()[0])
    row = next(line["first"] for line in told if line.get("samples") == "train")
    values = {name: value for name, value in first.items() if not isinstance(value, list)}
    assert row == {**values, "prompt": row["prompt"], "completion": row["completion"]}
    assert row["prompt"] + row["completion"] == first["tokens"]
    # the console has the first and the last in short
    said = capsys.readouterr().out
    response = json.dumps(row["completion"], ensure_ascii=False)
    assert f"  train sample 1 of 4: reward {first['rewards']:.4g}  " in said and f" -> {response}\n" in said
    assert "  train sample 4 of 4: reward " in said and "  eval sample 32 of 32: reward " in said
    assert lines[2]["time/save"] > 0 and "time/save" not in lines[1]


FAILS = """
print("the file is loaded")


class Tracker:
    def __init__(self, folder, graph):
        pass

    def log(self, values, step):
        self.fail("log", step == 1)

    def samples(self, name, rows, step):
        self.fail("samples", False)

    def close(self, failed):
        self.fail("close", True)

    def fail(self, where, fails):
        print("tracker", where)
        if fails:
            raise OSError(f"no service in {where}")


class Closes(Tracker):
    def log(self, values, step):
        pass


class Opens(Closes):
    def __init__(self, folder, graph):
        tried = folder / "tried"
        with tried.open("a") as file:
            file.write("x")
        self.fail("open", len(tried.read_text()) == 1)

    def log(self, values, step):
        print("tracked", step)

    def close(self, failed):
        pass


class Exits(Closes):
    def log(self, values, step):
        raise SystemExit("no more")

    def close(self, failed):
        raise KeyboardInterrupt
"""


def test_a_run_goes_on_without_a_tracker_that_fails(
    in_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text(FAILS)
    few = ("prompts.batch=2", "rollout.n=2", "schedule.iterations=2")
    names = ["own.py:Tracker", "own.py:Closes", "own.py:Opens", "own.py:Exits"]
    run_graph(ONES, few, 1, run_dir=Path("run"), inline=True, track=names)
    said = capsys.readouterr().out
    assert said.count("note: the tracker own.py:Tracker failed: OSError: no service in log\n") == 1
    assert said.count("note: the tracker own.py:Closes failed: OSError: no service in close\n") == 1
    assert said.count("note: the tracker own.py:Opens failed: OSError: no service in open\n") == 1
    assert said.count("note: the tracker own.py:Exits failed: SystemExit: no more\n") == 1
    assert said.count("tracker log") == 2 and "tracked" not in said, "they are not asked again"
    assert said.count("the file is loaded") == 1
    assert "is done after 2 iterations" in said
    assert [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
    ]
    run_graph(ONES, few, 1, run_dir=Path("run"), inline=True, track=names, resume=True, steps=3)
    assert "tracked 3" in capsys.readouterr().out, "it is there again once the run is"


POSTS = """
import urllib.request

class Tracker:
    def __init__(self, folder, graph):
        pass

    def log(self, values, step):
        with urllib.request.urlopen("http://127.0.0.1:%d", b"{}") as reply:
            reply.read()

    def close(self, failed):
        print("closed")
"""


@pytest.mark.parametrize("drips", [False, True], ids=["silent", "dripping"])
def test_a_tracker_whose_service_never_answers_is_left_behind(
    folder: Path, drips: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" if drips else b"")
        while drips and not ended.wait(0.2):
            connection.sendall(b" ")
        ended.wait()
        connection.close()

    ended = threading.Event()
    monkeypatch.setenv(VARIABLE, "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=serve, args=(server,))
        answering.start()
        (folder / "own.py").write_text(POSTS % server.getsockname()[1])
        notes: list[str] = []
        name = f"{folder}/own.py:Tracker"
        trackers = Trackers(folder, "small", make_of([name]), note=notes.append)
        since = time.monotonic()
        for step in (1, 2):
            trackers.log(FIRST, step)
        trackers.close(failed=False)
        took = time.monotonic() - since
        ended.set()
        answering.join()
    assert took < 20 and "closed" not in capsys.readouterr().out
    (note,) = notes
    assert note.startswith(f"the tracker {name} failed: log took over 1 s (RLGRAPH_TRACKER_SECONDS); is its")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_limit_that_is_not_a_duration_is_refused(
    folder: Path, seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, seconds)
    with pytest.raises(RunError, match=f"RLGRAPH_TRACKER_SECONDS={seconds} is not a number of seconds"):
        Trackers(folder, "small")


def test_samples_stay_cells_of_their_table(folder: Path) -> None:
    trackers = Trackers(folder, "small")
    trackers.samples("train", [{"responses": "one\r\ntwo\rthree\nfour"}], 1)
    trackers.close(failed=False)
    found = b"".join(file.read_bytes() for file in (folder / "tensorboard").iterdir())
    assert b"| one<br>two<br>three<br>four |" in found


def test_the_tracker_of_the_documents_takes_what_a_run_gives(folder: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    block = text.split("A tracker of your own is a class")[1].split("```python\n")[1].split("```")[0]
    (folder / "my_tracker.py").write_text(block)
    trackers = Trackers(folder, "small", make_of([f"{folder / 'my_tracker.py'}:Tracker"]))
    trackers.samples("train", ROWS, 1)
    trackers.log(FIRST, 1)
    trackers.close(failed=False)
    assert (folder / "rewards.txt").read_text() == "1 0.5\n"


def asked(url: str) -> str:
    with urllib.request.urlopen(url) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(reply.read().decode())


def test_prometheus_can_ask_for_the_newest_metrics_while_a_run_goes_on(folder: Path) -> None:
    endpoint = MetricsEndpoint("0", 'a"b')
    try:
        assert endpoint.url.startswith("http://127.0.0.1:") and asked(endpoint.url) == ""
        trackers = Trackers(folder, "small", {}, [endpoint])
        trackers.log(FIRST, 1)
        trackers.close(failed=True)  # a restart, over which it lasts
        trackers.log(SECOND | {"a/b_c": 1e-7, "a_b/c": 3}, 2)
        text = asked(endpoint.url)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(endpoint.url.replace("/metrics", "/"))
        with pytest.raises(RunError, match="nothing can listen there"):
            MetricsEndpoint(endpoint.url.split("/")[2], "other")
    finally:
        endpoint.close()
    with pytest.raises(urllib.error.URLError):
        asked(endpoint.url)
    line = re.compile(
        r'(# TYPE [a-z_0-9]+ gauge|[a-zA-Z_][a-zA-Z0-9_]*\{graph="a\\"b",name="[^"]*"\} [0-9.e+-]+)'
    )
    lines = text.splitlines()
    assert all(line.fullmatch(one) for one in lines)
    assert 'rlgraph_step{graph="a\\"b",name="step"} 2.0' in lines
    assert 'rlgraph_eval_pass_8{graph="a\\"b",name="eval/pass@8"} 0.25' in lines
    assert [one for one in lines if one.startswith("# TYPE rlgraph_a_b_c")] == ["# TYPE rlgraph_a_b_c gauge"]
    assert sum(one.startswith("rlgraph_a_b_c{") for one in lines) == 2, "two names that become one stay apart"


def test_an_evaluation_is_served_until_the_next_and_a_loss_that_is_lost_is_not(folder: Path) -> None:
    endpoint = MetricsEndpoint("0", "small")
    try:
        endpoint.log({"eval/accuracy": 0.5, "update/loss": 1.0}, 1)
        endpoint.log({"reward/mean": 0.25}, 2)
        names = set(re.findall(r'name="([^"]*)"', asked(endpoint.url)))
        assert names == {"step", "timestamp_seconds", "reward/mean", "eval/accuracy"}
        endpoint.log({"eval/accuracy": 0.75}, 3)
        assert asked(endpoint.url).count("eval/accuracy") == 1 and "0.75" in asked(endpoint.url)
    finally:
        endpoint.close()


def test_who_hangs_up_before_the_answer_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    endpoint = MetricsEndpoint("0", "small")
    try:
        with socket.create_connection(endpoint.server.server_address[:2]) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset at once
            client.sendall(b"GET /metr")
        assert asked(endpoint.url) == "", "the first request has a thread by now"
        for thread in (each for each in threading.enumerate() if "process_request" in each.name):
            thread.join()
    finally:
        endpoint.close()
    assert capfd.readouterr().err == ""


def test_what_prometheus_gets_is_read_by_its_own_parser() -> None:
    parser = pytest.importorskip("prometheus_client.parser", exc_type=ImportError)
    found = [*parser.text_string_to_metric_families(exposition(SECOND, 'a"\\\n'))]
    labels = {sample.labels["name"]: sample.value for family in found for sample in family.samples}
    assert labels == SECOND and {family.type for family in found} == {"gauge"}
    assert {sample.labels["graph"] for family in found for sample in family.samples} == {'a"\\\n'}


@pytest.mark.parametrize("address", ["x", "99999", "127.0.0.1:"])
def test_a_place_to_listen_at_is_a_port(address: str) -> None:
    with pytest.raises(RunError, match=r"--metrics-port .*: nothing can listen there"):
        MetricsEndpoint(address, "graph")


def test_a_place_that_is_taken_leaves_no_run_directory(in_demo: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(RunError, match=f"--metrics-port {port}: nothing can listen there"):
            run_graph(ONES, (), 1, run_dir=Path("run"), inline=True, metrics_port=port)
    assert not Path("run").exists()


@pytest.mark.filterwarnings("default")  # the service's own
def test_mlflow_keeps_one_run_over_a_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
    pytest.importorskip("mlflow.store.tracking.sqlalchemy_store", exc_type=ImportError)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked(["mlflow"], folder)
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert run.info.run_id == json.loads((folder / IDS).read_text())["mlflow"]
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {"reward/mean": 0.75, "eval/pass_8": 0.25, "time/step": 1.5}
    (tables,) = Path(folder, "mlflow").glob("*/artifacts/samples")
    assert sorted(path.name for path in tables.iterdir()) == ["eval-000001.json", "eval-000002.json"]
    table = json.loads((tables / "eval-000002.json").read_text())
    assert table["columns"] == [*ROWS[0]] and table["data"] == [[*row.values()] for row in ROWS]
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.75)]


@pytest.mark.filterwarnings("default")
def test_wandb_keeps_one_run_over_a_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = Trackers(folder, "small", make_of(["wandb"]))
    trackers.samples("eval", ROWS, 1)
    trackers.log(SECOND, 1)
    trackers.close(failed=False)
    name = json.loads((folder / IDS).read_text())["wandb"]
    (log,) = (folder / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")
    assert b"eval/pass@8" in log.read_bytes() and b"time/step" in log.read_bytes()
    assert b"samples/eval/rewards" in log.read_bytes()
    (table,) = log.parent.rglob("media/table/samples/eval*.table.json")
    held = json.loads(table.read_text())
    assert held["columns"] == [*ROWS[0]] and held["data"] == [[*row.values()] for row in ROWS]
    again = Wandb(folder, "small")
    assert again.run.id == name
    again.close(failed=False)
    monkeypatch.setenv("WANDB_RUN_ID", "of-a-sweep")  # its agent says which run this is
    (folder / IDS).unlink()
    swept = Wandb(folder, "small")
    assert swept.run.id == "of-a-sweep"
    swept.close(failed=False)


@pytest.mark.parametrize("text", ["0", "x", "1,,2", "3-4"])
def test_iterations_are_whole_numbers_from_1(text: str) -> None:
    done = CliRunner().invoke(main, ["run", "demo", "--profile", text])
    assert done.exit_code == 2 and "counted from 1: write 3 or 3,4" in done.output


@pytest.mark.slow
def test_chosen_iterations_are_traced(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    monkeypatch.chdir(tmp_path)
    few = ("prompts.batch=2", "rollout.n=2")
    run_graph(ONES, few, 1, run_dir=Path("run"), inline=True, profile=[1, 3])
    traces = sorted(str(path.relative_to("run/profile")) for path in Path("run/profile").rglob("*.gz"))
    assert traces == ["step-000001/main-0.json.gz", "step-000003/main-0.json.gz"]
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4]
    trace = json.loads(gzip.decompress(Path("run/profile", traces[1]).read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names
    # each step has a range of its own, which Nsight Systems sees too
    ranges = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {"run rollout", "run rewards", "run update_policy", "engine sync policy"} <= ranges
