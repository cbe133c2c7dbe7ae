"""What a run shows on a terminal: a pseudo-terminal, with a process of its own behind it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.reports.outcome import outcome
from rlgraph.runtime.demo import questions, write_parquet
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.progress import Progress

HERE = Path(__file__).parent
ONES = str(HERE / "ones.yaml")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
COLUMNS = 100
CTRL_C = b"\x03"
pytestmark = pytest.mark.usefixtures("in_demo")


def on_a_terminal(*args: str, wait_for: str = "", then: bytes = b"") -> tuple[str, int]:
    """Run the command line on a terminal, and type once it shows a text: what it wrote, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlgraph", "run", *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env | {"TERM": "xterm", "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that what is typed can interrupt it
    )
    os.close(theirs)
    seen, end, typed = b"", time.monotonic() + 400, not then
    while time.monotonic() < end:
        if not typed and re.search(wait_for.encode(), seen):
            typed = os.write(ours, then) > 0
        if select.select([ours], [], [], 0.2)[0]:
            try:
                seen += os.read(ours, 2**16)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    return seen.decode(), process.wait(timeout=60)


def words(text: str) -> str:
    return CONTROL.sub("", text).replace("\r", "")


@pytest.mark.slow
def test_a_failing_run_takes_its_table_away_and_says_all_of_the_error() -> None:
    broken = f"nodes.rewards={{op: {HERE / 'ones_ops.py'}:raises}}"
    write_parquet(Path("long.parquet"), 4 * questions(seed=0)[1])  # so that the evaluation is seen
    long = "eval.nodes.prompts.files=[long.parquet]"
    text, code = on_a_terminal(ONES, "--inline", "--run-dir", "a", broken, long)
    table, _, after = text.partition(SHOW)
    assert code == 1 and text.count(HIDE) == text.count(SHOW) == 1
    assert "\x1b[2J" not in text, "the screen is never wiped"
    shown = words(table)
    assert re.search(r"ones +iteration 1 of 4 ", shown) and re.search(r"main +evaluate: rollout \d", shown)
    assert re.search(r"last +reward [\d.]+ +[\d,]+ tokens/s ", shown) and re.search(
        r"eval +accuracy (0|0\.\d+)\s", shown
    )
    # as many lines are taken away as the table had when it was drawn last
    last = table.rpartition("\x1b[2K")[2]
    assert after.lstrip("\r\n").startswith("\x1b[1A\x1b[2K" * last.count("\n"))
    said = words(after)
    assert "ArithmeticError: the abacus broke" in said and "of iteration 2 failed on main[0]" in said
    assert "whole traceback, and the plan with a mark where it failed: a/failure.txt" in said
    assert "iteration 1 of 4" not in said


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_the_run_in_words_and_gives_the_cursor_back() -> None:
    settings = (ONES, "schedule.iterations=100000", "--inline", "--run-dir", "a")
    text, code = on_a_terminal(*settings, wait_for="iteration [1-9]", then=CTRL_C)
    assert code == 1 and text.count(HIDE) == text.count(SHOW) == 1
    assert "continue with: rlgraph resume a" in words(text.partition(SHOW)[2])


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "is_kept"), [(b"y\r", True), (b"\r", True), (b"n\r", False)])
def test_a_setting_that_is_left_out_of_a_resume_is_asked_about(answer: bytes, is_kept: bool) -> None:
    settings = (ONES, "schedule={iterations: 2, save_every: 1}", "rollout.n=2")
    run_graph(
        settings[0], (*settings[1:], "rollout.temperature=0.9"), 1, steps=1, run_dir=Path("a"), inline=True
    )
    resume = (*settings, "--inline", "--resume", "--run-dir", "a")
    text, code = on_a_terminal(*resume, wait_for=r"Keep it\? \[Y/n\]", then=answer)
    said = words(text)
    assert code == 0, said
    assert "a was started with rollout.temperature=0.9, which is left out now. Keep it? [Y/n]" in said
    assert ("changed from here on: nodes.rollout.temperature: 0.9 -> 1.0" not in said) == is_kept
    assert "resumed after iteration 1" in said


def test_elsewhere_it_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    plan = compile_graph(ONES, (), 1)
    with Progress(plan, 2, Path("[a]")) as progress:
        progress.say("loading models")
        for number in (1, 2):
            progress.steps({"main": plan.steps[0]})
            progress.iteration(
                {"step": number, "reward/mean": 0.25, "tokens/generated": 30, "time/step": 0.1}
            )
        progress.evaluation(2, {"eval/accuracy": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "run directory [a]",
        "loading models",
        "iteration 1/2  reward 0.250  300 tokens/s  0.10 s",
        "iteration 2/2  reward 0.250  300 tokens/s  0.10 s",
        "after 2 iterations: eval/accuracy 0.500",
    ]


def test_the_end_says_what_the_headline_of_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts what was before a resume, no counts of rows, and the speed of all iterations."""
    lines: list[dict[str, float]] = [
        {"step": 0, "eval/accuracy": 0.125, "eval/rows": 64},
        {"step": 1, "reward/mean": 0.25, "tokens/generated": 300, "time/step": 9},
        {"step": 2, "reward/mean": 0.5, "tokens/generated": 300, "time/step": 1},
        {"step": 3, "reward/mean": 0.5, "tokens/generated": 300, "time/step": 1},
        {"step": 4, "reward/mean": 0.75, "tokens/generated": 300, "time/step": 4},
        {"step": 4, "eval/accuracy": 0.5, "eval/rows": 64},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with Progress(compile_graph(ONES, (), 1), 4, tmp_path) as progress:
        progress.resumed(3)
        progress.iteration(lines[4])
        progress.evaluation(4, {"eval/accuracy": 0.5, "eval/rows": 64})
    capsys.readouterr()
    progress.farewell()
    reached = outcome(lines, None)
    assert reached["accuracy"] == "0.125 -> 0.5"
    assert reached["speed"] == "1 s per iteration, 150 tokens per second"
    said = capsys.readouterr().out.partition("\n\nlook at it")[0]
    assert said.splitlines()[2:] == [f"  accuracy: {reached['accuracy']}", f"  {reached['speed']}"]


def test_what_it_prints_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(compile_graph(ONES, devices=1), 2, Path("a")) as progress:
        progress.note("\x1b]0;mine\x07 \x1b[2J")
    assert r"note: \x1b]0;mine\x07 \x1b[2J" in capsys.readouterr().out
