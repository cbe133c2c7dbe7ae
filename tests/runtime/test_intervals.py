"""Checkpoints, evaluations and records by epochs and by the clock; the best checkpoint, which stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ran import metrics, same_weights
from safetensors.torch import load_file

from rlgraph.cli.main import main
from rlgraph.errors import GraphError, RunError
from rlgraph.reports.report import make_report, report_text
from rlgraph.runtime import due
from rlgraph.runtime.export import export
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
ONE, TWO = str(HERE / "ones.yaml"), str(HERE / "ones_two.yaml")
AHEAD = ("schedule.buffer={staleness: 1, by: batch}", "update_policy.in.old_logprobs=rollout_logprobs")
TEN = ("prompts.files=[ten.jsonl]", "prompts.batch=4")  # epochs end inside the third batch and with the fifth


@pytest.fixture(autouse=True)
def _data(in_demo: None) -> None:
    rows = [json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(10, 20)]
    Path("ten.jsonl").write_text("\n".join(rows) + "\n")


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A clock on which each iteration takes ten seconds; it begins where it is told, as that of a machine."""

    def begin(at: int) -> None:
        ticks = count(at, 10)
        monkeypatch.setattr(due, "seconds_now", lambda: float(next(ticks)))

    return begin


def train(run_dir: str, *settings: str, graph: str = ONE, **options: Any) -> list[dict[str, Any]]:
    run_graph(graph, settings, 1, run_dir=Path(run_dir), inline=True, **options)
    return metrics(run_dir)


def saved(run_dir: str) -> list[int]:
    names = sorted(os.listdir(f"{run_dir}/checkpoints"))
    assert all(name.startswith("step-") for name in names)
    return [int(name.removeprefix("step-")) for name in names]


def state(run_dir: str, iteration: int) -> dict[str, Any]:
    return dict(json.loads(Path(run_dir, f"checkpoints/step-{iteration:06d}/state.json").read_text()))


def trained(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines without evaluations: a run makes one where it ends."""
    return [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines]


def evaluated(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if "eval/accuracy" in line]


def test_epochs_are_counted_by_the_rows_that_the_source_has_given() -> None:
    schedule = "schedule={iterations: 6, save_every: 0.5 epochs, keep: 9, record_every: 1 epoch}"
    lines = train("a", *TEN, schedule, "eval.every=1 epoch of prompts")
    assert saved("a") == [2, 3, 4, 5, 6], "after 4, 8, 12, 16, 20 and 24 rows of 10"
    assert evaluated(lines) == [0, 3, 5, 6]
    assert sorted(os.listdir("a/recorded")) == ["step-000001", "step-000004", "step-000006"]
    assert [path.name for path in sorted(Path("a/samples").glob("*[0-9].jsonl"))] == [
        f"step-{n:06d}.jsonl" for n in saved("a")
    ]


@pytest.mark.slow
def test_epochs_of_a_filter_that_refills_are_counted_as_it_takes_them() -> None:
    graph = str(HERE / "refilled.yaml")
    length = (TEN[0], "schedule.iterations=5", "schedule.keep=9")
    train("each", *length, "schedule.save_every=1", graph=graph)
    rows = [0, *(state("each", n)["positions"]["prompts"] for n in range(1, 6))]
    crossed = [n for n in range(1, 6) if rows[n] // 15 > rows[n - 1] // 15]
    assert crossed not in ([5], [1, 2, 3, 4, 5]), "else it would not matter what is counted"
    train("a", *length, "schedule.save_every=1.5 epochs", graph=graph)
    assert saved("a") == sorted({*crossed, 5})
    assert same_weights("a", "each")


@pytest.mark.slow
def test_a_pipeline_is_emptied_where_epochs_end_and_goes_on_from_there_bit_for_bit() -> None:
    settings = (
        *TEN,
        *AHEAD,
        "schedule={iterations: 6, save_every: 1 epoch, keep: 9, buffer: {staleness: 1, by: batch}}",
    )
    whole = train("whole", *settings, graph=TWO)
    assert saved("whole") == [3, 5, 6]
    train("part", *settings, graph=TWO, steps=3)
    assert trained(train("part", *settings, graph=TWO, resume=True)) == trained(whole)
    assert same_weights("part", "whole")
    whole = train("other", *settings, "schedule.save_every=0", graph=TWO)
    assert trained(whole) != trained(metrics("whole")), "else it would not matter where it is emptied"


@pytest.mark.slow
def test_the_clock_goes_on_where_the_checkpoint_has_it(ticking: Callable[[int], None]) -> None:
    settings = ("schedule={iterations: 9, save_every: 25 s, keep: 9}", "eval.every=0.5 min")
    ticking(1000)
    whole = train("whole", *settings)
    assert saved("whole") == [3, 5, 8, 9]
    assert evaluated(whole) == [0, 3, 6, 9]
    assert [state("whole", n)["seconds"] for n in saved("whole")] == [30, 50, 80, 90]
    ticking(1000)
    train("part", *settings, steps=4)
    ticking(777_000)
    again = train("part", *settings, resume=True)
    assert saved("part") == [3, 4, 5, 8, 9]
    assert evaluated(again) == [0, 3, 4, 6, 9]
    assert [state("part", n)["seconds"] for n in (5, 8, 9)] == [50, 80, 90]
    assert same_weights("part", "whole")


def test_iterations_that_are_longer_than_an_interval_are_due_once_each(
    ticking: Callable[[int], None],
) -> None:
    ticking(0)
    lines = train("a", "schedule={iterations: 3, save_every: 1 s, keep: 9}", "eval.every=3 s")
    assert saved("a") == [1, 2, 3]
    assert evaluated(lines) == [0, 1, 2, 3]


def test_what_is_recorded_by_the_clock_follows_what_is_saved_by_it(ticking: Callable[[int], None]) -> None:
    ticking(0)
    train("a", "schedule={iterations: 6, save_every: 20 s, record_every: 20 s, keep: 9}")
    assert saved("a") == [2, 4, 6]
    assert sorted(os.listdir("a/recorded")) == [f"step-{n:06d}" for n in (1, 3, 5)]


@pytest.mark.slow
def test_a_run_that_saves_by_the_clock_and_is_killed_goes_on_bit_for_bit() -> None:
    settings = ("schedule={iterations: 500, save_every: 0.2 s}", "eval.every=0.3 s", "--run-dir", "a")
    command = [sys.executable, "-m", "rlgraph", "run", ONE, "--inline", *settings]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while len([*Path("a/checkpoints").glob("step-*")]) < 2:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = saved("a")[-1] if "writing" not in os.listdir("a/checkpoints") else None
    last = last or max(int(path.name[5:]) for path in Path("a/checkpoints").glob("step-*"))
    before = state("a", last)["seconds"]
    assert before >= 0.2
    train("a", *settings[:2], steps=last + 2, resume=True)
    assert state("a", last + 2)["seconds"] > before
    train("b", "schedule.iterations=500", steps=last + 2)
    assert trained(metrics("a")) == trained(metrics("b"))
    assert same_weights("a", "b")


def test_rows_that_only_a_source_knows_are_no_epochs() -> None:
    graph = str(HERE / "streamed.yaml")
    with pytest.raises(GraphError) as raised:
        train("a", "schedule.save_every=1 epoch", graph=graph)
    law = "`schedule.save_every`: only `numbers` itself knows how many rows it gives"
    assert law in str(raised.value)
    assert "give iterations, or a duration as 30 min" in str(raised.value)


def best(mode: str = "max", keep: int = 1) -> str:
    return f"schedule.best={{metric: eval/{MEASURED[mode]}, mode: {mode}, keep: {keep}}}"


def ranked(lines: list[dict[str, Any]], mode: str = "max") -> list[int]:
    """The iterations that were evaluated, the best first; of equal ones the first."""
    sign, metric = -1 if mode == "max" else 1, f"eval/{MEASURED[mode]}"
    values = [(sign * line[metric], line["step"]) for line in lines[1:] if metric in line]
    return [step for _, step in sorted(values)]


MEASURED = {"max": "near", "min": "accuracy"}  # what is best on the way: the rewards rise
NEAR = f"eval.nodes.near={{op: '{HERE / 'interval_ops.py'}:near'}}"
EVERY = ("schedule.iterations=6", "schedule.keep=1", "eval.every=1", NEAR, "eval.report.near=near")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("max", ()),
        ("min", ("schedule.save_every=1",)),
        ("max", ("schedule.save_every=1",)),
        ("max", ("schedule.restarts=1",)),
    ],
)
def test_the_best_checkpoint_stays_and_its_export_is_the_model_of_then(
    mode: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = train("a", *EVERY, *more, best(mode))
    first = ranked(lines, mode)[0]
    assert first < 6, "else the last checkpoint is the best, and nothing is to be shown"
    assert saved("a") == [first, 6]
    metric, side = f"eval/{MEASURED[mode]}", "highest" if mode == "max" else "lowest"
    law = f"`{metric}` is {side} after iteration {first}: {lines[first][metric]:.4g}"
    said = capsys.readouterr().out.rpartition("is done after")[2]
    assert f"\n  {law} (schedule.best)\n\nlook at it:\n" in said
    assert "\n  rlgraph export a --checkpoint best --to DIR  the best, for transformers\n" in said
    report = make_report(Path("a"))
    assert report.best == f"{law} (schedule.best)"
    assert f"  {report.best}\n" in report_text(report)
    export(Path("a"), Path("exported"), checkpoint="best")
    train("then", "schedule.iterations=6", steps=first)
    one, other = (load_file(f"{run}/model.safetensors") for run in ("exported", "then/models/policy"))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
def test_several_of_the_best_stay() -> None:
    lines = train("a", *EVERY, best(keep=2))
    assert saved("a") == sorted({*ranked(lines)[:2], 6})


@pytest.mark.slow
def test_a_resumed_run_keeps_the_best_of_before() -> None:
    whole = train("whole", *EVERY, best())
    first = ranked(whole)[0]
    assert first < 5
    train("part", *EVERY, best(), steps=first + 1)
    assert train("part", *EVERY, best(), resume=True) == whole
    assert saved("part") == saved("whole") == [first, 6]
    train("part", *EVERY, best(), resume_from="best")
    assert saved("part") == saved("whole")
    assert same_weights("part", "whole")
    assert os.listdir("part/aside") == [f"step-{first:06d}"]


@pytest.mark.slow
def test_where_generation_streams_the_evaluation_decides_behind_the_next_iteration() -> None:
    stream = ("schedule.buffer={staleness: 1, chunk: 4, order: in_order}", AHEAD[1])
    lines = train("a", *EVERY, *stream, best(), graph=TWO)
    first = ranked(lines)[0]
    assert saved("a") == sorted({first, 6})
    assert not Path("a/checkpoints/writing").exists()
    train("then", "schedule.iterations=6", *stream, steps=first, graph=TWO)
    export(Path("a"), Path("exported"), checkpoint="best")
    one, other = (load_file(f"{run}/model.safetensors") for run in ("exported", "then/models/policy"))
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
def test_what_is_not_whole_is_not_the_best(tmp_path: Path) -> None:
    lines = train("a", *EVERY, best(keep=2))
    first, second = ranked(lines)[:2]
    Path(f"a/checkpoints/step-{first:06d}").rename("a/checkpoints/writing")
    export(Path("a"), Path("one"), checkpoint="best")
    exported = load_file("one/model.safetensors")
    train("then", "schedule.iterations=6", steps=second)
    assert all(exported[k].equal(v) for k, v in load_file("then/models/policy/model.safetensors").items())
    train("plain", "schedule.iterations=1")
    with pytest.raises(RunError, match=r"plain has no best checkpoint: its graph has no schedule.best\n"):
        export(Path("plain"), Path("two"), checkpoint="best")
    with pytest.raises(RunError, match="did you mean `best`"):
        export(Path("plain"), Path("two"), checkpoint="bests")
    train("begun", *EVERY, best(), "eval.before=false", steps=1)
    lines = [json.loads(line) for line in Path("begun/metrics.jsonl").read_text().splitlines()]
    bare = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines]
    Path("begun/metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in bare))
    with pytest.raises(RunError, match="no evaluation has measured `eval/near`"):
        export(Path("begun"), Path("two"), checkpoint="best")


@pytest.mark.parametrize(
    ("schedule", "warned"),
    [
        ("{epochs: 2, save_every: 6}", "is 6, and the run has 5 iterations"),
        ("{epochs: 2, save_every: 4}", ""),
        ("{iterations: 2, save_every: 1 epoch}", "is 1 epoch of prompts, and the run has 2 iterations"),
        ("{iterations: 3, save_every: 1 epoch}", ""),
        ("{iterations: 3, save_every: 90 days}", ""),
    ],
)
def test_the_rows_say_which_intervals_are_longer_than_the_run(schedule: str, warned: str) -> None:
    checked = CliRunner().invoke(main, ["check", "--files", ONE, *TEN, f"schedule={schedule}"])
    assert checked.exit_code == 0, checked.output
    assert ("checkpoints come only at the end" in checked.output) == bool(warned)
    assert f"`schedule.save_every` {warned}" in checked.output or not warned
