"""Runs that go on where they were: bit for bit, after a kill at any moment, a full disk, a missing file."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ran import same_weights

from rlgraph.cli.main import main
from rlgraph.errors import GraphError, RunError
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
ONE, TWO = str(HERE / "ones.yaml"), str(HERE / "ones_two.yaml")


@pytest.fixture(autouse=True)
def _data(in_demo: None) -> None:
    rows = [json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(10, 20)]
    Path("ten.jsonl").write_text("\n".join(rows) + "\n")


def inline(graph: str, *settings: str, run_dir: str, steps: int | None = None, resume: bool = False) -> None:
    run_graph(graph, settings, 1, steps=steps, run_dir=Path(run_dir), resume=resume, inline=True)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "rlgraph", "run", ONE, "--inline", *args]


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """A disk that takes no more than so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # half of a module would stay
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes


def metrics(run_dir: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, without times, and without evaluations: a run makes one where it ends."""
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "eval/"))} for line in lines
    ]


# over two pools, test_pools.py resumes by day
@pytest.mark.parametrize("graph", [ONE, pytest.param(TWO, marks=pytest.mark.nightly)])
def test_three_iterations_and_three_after_a_resume_are_six_bit_for_bit(graph: str) -> None:
    # ten rows, shuffled, in batches of four: epochs end inside the third batch and with the fifth
    optimizer = "models.policy.optimizer={lr: 1e-3, schedule: cosine, warmup_steps: 4}"
    settings = ("prompts.files=[ten.jsonl]", "prompts.batch=4", "schedule.iterations=6", optimizer)
    inline(graph, *settings, run_dir="six")
    inline(graph, *settings, steps=3, run_dir="three")
    inline(graph, *settings, run_dir="three", resume=True)
    assert metrics("three") == metrics("six")
    assert same_weights("three", "six")
    rates = [line["update_policy/lr"] for line in metrics("six")[1:]]
    assert rates[0] < rates[1] > rates[2] > rates[5]
    events = json.loads(Path("three/timeline.json").read_text().rstrip().rstrip(",") + "]")
    assert sorted({event["args"]["iteration"] for event in events}) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_checkpoint_resumes_from_the_last_whole_one() -> None:
    process = subprocess.Popen(
        command("schedule={iterations: 300, save_every: 1}", "--run-dir", "a"), stdout=subprocess.DEVNULL
    )
    while not Path("a/checkpoints/step-000002").exists():
        assert process.poll() is None
        time.sleep(0.1)
    while not [*Path("a/checkpoints").glob("writing/*/*")]:  # which it is for milliseconds
        assert process.poll() is None
        time.sleep(0.0005)
    process.kill()
    process.wait()
    done = max(int(path.name.removeprefix("step-")) for path in Path("a/checkpoints").glob("step-*"))
    inline(ONE, "schedule={iterations: 300, save_every: 1}", run_dir="a", steps=done + 2, resume=True)
    inline(ONE, "schedule={iterations: 300, save_every: 0}", run_dir="b", steps=done + 2)
    assert metrics("a") == metrics("b")
    assert same_weights("a", "b")
    assert not Path("a/checkpoints/writing").exists()


@pytest.mark.slow
def test_a_disk_that_takes_no_more_ends_the_run_and_spares_what_is_whole() -> None:
    schedule = "schedule={iterations: 3, save_every: 2}"
    with files_of_at_most(2**20), pytest.raises(RunError) as raised:
        inline(ONE, schedule, run_dir="a")
    assert "! finish_save, after iteration 2" in Path("a/failure.txt").read_text()
    assert "then continue with: rlgraph resume a" in str(raised.value)
    assert "the disk takes no more (file too large" in str(raised.value)
    assert not os.listdir("a/checkpoints")
    assert [line["step"] for line in metrics("a")] == [0, 1, 2, 3], "it was written while iteration 3 ran"
    call_resume = shlex.split(str(raised.value).split("continue with: rlgraph ")[1].splitlines()[0])
    assert CliRunner().invoke(main, call_resume).exit_code == 0
    inline(ONE, schedule, run_dir="b")
    assert metrics("a") == metrics("b")
    assert same_weights("a", "b")


# TensorBoard writes in a thread of its own, which ends by the same error
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?s).*File too large:pytest.PytestUnhandledThreadExceptionWarning")
def test_metrics_that_find_no_room_end_the_run_with_a_word() -> None:
    # of what the driver writes, the timeline is full first
    with files_of_at_most(30 * 2**10), pytest.raises(RunError, match=r"a: the disk takes no more \(file too"):
        inline(ONE, "schedule={iterations: 1000}", run_dir="a")


@pytest.mark.nightly
def test_a_process_that_finds_no_room_ends_in_words() -> None:
    limited = ["bash", "-c", 'ulimit -f 30; exec "$@"', "bash"]  # KiB
    settings = command("schedule={iterations: 1000}", "--run-dir", "a")
    done = subprocess.run([*limited, *settings], capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a: the disk takes no more (file too large" in done.stderr


def test_data_that_has_gone_since_is_named_before_anything_starts() -> None:
    settings = ("prompts.files=[ten.jsonl]", "prompts.batch=4")
    inline(ONE, *settings, steps=1, run_dir="a")
    Path("ten.jsonl").unlink()
    with pytest.raises(GraphError, match=r"ten.jsonl: there is no such file"):
        inline(ONE, *settings, steps=2, run_dir="a", resume=True)
    assert [line["step"] for line in metrics("a")] == [0, 1]
