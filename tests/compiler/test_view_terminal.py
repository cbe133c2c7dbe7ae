"""A plan in a terminal: colours and lanes there, plain text elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Target
from rlgraph.printing.plan_text import plan_text
from rlgraph.view.terminal import terminal_text

AHEAD = """
graph: ahead
extends: ppo
edits:
  - add: {pools.train: {devices: 6}, pools.gen: {devices: 2}}
  - remove: [pools.main]
  - set: {schedule.staleness: 1, update_policy.in.old_logprobs: rollout_logprobs}
"""


@pytest.mark.parametrize("name", ["grpo", "demo"])
def test_it_is_the_plan_and_what_closes_it(name: str) -> None:
    plan = compile_graph(name, devices=2)
    shown = click.unstyle(terminal_text(plan))
    said = shown.partition("\nan iteration of the steady state")[0]
    assert said.split() == plan_text(plan).split()  # but for lines that were broken
    assert all(len(line) <= 100 for line in shown.splitlines())
    inserted = sum(step.inserted for step in plan.steps)
    assert shown.endswith(f"\n{len(plan.steps)} steps, {inserted} of them inserted\n")


def test_pools_have_lanes_and_bars_within_100_columns(tmp_path: Path) -> None:
    path = tmp_path / "ahead.yaml"
    path.write_text(AHEAD)
    plan = compile_graph(str(path), target=Target("h100-8"))
    styled = terminal_text(plan).partition("an iteration of the steady state: ")[2]
    lines = click.unstyle(styled).splitlines()
    assert all(len(line) <= 100 for line in lines)
    train, gen = lines[1:3]
    assert train.startswith("  train ") and train.count("update_po") == 1 and "rollout" not in train
    assert gen.startswith("  gen ") and "rollout" in gen
    assert lines[3] == "memory of a device at its peak"
    assert lines[4].startswith("  train ") and " of 80 GB" in lines[4]
    assert plan.peak
    full = [line.count("█") / (line.count("█") + line.count("░")) for line in lines[4:6]]
    shares = [peak.bytes / peak.capacity for peak in plan.peak.values()]
    assert full == pytest.approx(shares, abs=0.02)


def shown_in_a_terminal(**env: str) -> str:
    """What ``rlgraph plan grpo`` prints to a terminal."""
    own, theirs = pty.openpty()
    command = [sys.executable, "-m", "rlgraph", "plan", "grpo", "--devices", "2"]
    with os.fdopen(own, "rb", buffering=0) as terminal:
        running = subprocess.Popen(command, stdout=theirs, env={**os.environ, "TERM": "xterm", **env})
        os.close(theirs)
        pieces = []
        while piece := _read(terminal.fileno()):
            pieces.append(piece)
        assert running.wait() == 0
    return b"".join(pieces).decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other side has closed it
        return b""


def test_a_terminal_gets_colours_unless_it_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in shown_in_a_terminal()
    plain = shown_in_a_terminal(NO_COLOR="1").replace("\r\n", "\n")
    assert plain == plan_text(compile_graph("grpo", devices=2))
