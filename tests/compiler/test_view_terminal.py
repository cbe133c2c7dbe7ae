"""A plan in a terminal: colours and lanes there, plain text elsewhere."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, fitted
from rlgraph.ir.plan import Target
from rlgraph.printing.plan_text import plan_text
from rlgraph.view.terminal import terminal_text

AHEAD = """
graph: ahead
extends: ppo
edits:
  - add: {pools.train: {devices: 6}, pools.gen: {devices: 2}}
  - remove: [pools.main]
  - set: {schedule.buffer: {staleness: 1, by: batch}, update_policy.in.old_logprobs: rollout_logprobs}
"""


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", ["grpo", "demo"])
def test_it_is_the_plan_and_what_closes_it(name: str, width: int) -> None:
    plan = compile_graph(name, devices=2)
    shown = click.unstyle(terminal_text(plan, width))
    said = shown.partition("\nan iteration of the steady state")[0]
    assert said.split() == plan_text(plan).split()  # but for lines that were broken
    assert all(len(line) <= width for line in shown.splitlines())
    inserted = sum(step.inserted for step in plan.steps)
    assert shown.endswith(f"\n{len(plan.steps)} steps, {inserted} of them inserted\n")


@pytest.mark.parametrize("words", ["plan grpo --cluster h100-8", "nodes", "graphs", "show grpo --tree"])
def test_a_terminal_of_80_columns_is_wide_enough(words: str) -> None:
    shown = click.unstyle(shown_in_a_terminal(*words.split(), COLUMNS="80"))
    lines = shown.replace("\r", "").splitlines()
    assert 60 < max(map(len, lines)) <= 80
    for lane in [line for line in lines if "█" in line or "·|" in line]:
        assert lane.startswith("  main ")  # none is broken


def test_json_stays_json_on_a_narrow_terminal() -> None:
    words = ("plan", "grpo", "--cluster", "h100-8", "--brief", "--format", "json")
    assert json.loads(shown_in_a_terminal(*words, COLUMNS="40"))["iteration"]["value"] > 0


def test_the_edits_of_a_diff_stay_yaml_on_a_narrow_terminal(tmp_path: Path) -> None:
    path, pattern = tmp_path / "other.yaml", "seven eight nine ten  eleven"  # a break would lose a space
    node = f"{{op: reward.format, pattern: '{pattern}'}}"
    path.write_text(f"graph: other\nextends: grpo\nedits:\n  - add: {{formatted: {node}}}\n")
    words = ("diff", "grpo", str(path), "--format", "yaml")
    for columns in range(40, 90, 10):
        shown = yaml.safe_load(shown_in_a_terminal(*words, COLUMNS=str(columns), expect=1))
        assert shown["edits"][0]["add"]["formatted"]["pattern"] == pattern


def test_settings_for_a_shell_stay_in_a_line() -> None:
    long = "  'pools={" + "main: {devices: 8}, " * 10 + "}'"
    assert fitted(f"a b\n{long}\n", 40).splitlines() == ["a b", long]


def test_the_mark_of_an_error_stays_below_its_place(tmp_path: Path) -> None:
    """A terminal breaks both lines at the same column."""
    rollout = "{op: rollout, model: policy, n: 8, max_new_tokens: 1024, temperature: 1.0, top_pp: 0.9}"
    path = tmp_path / "long.yaml"
    path.write_text(f"graph: long\nextends: grpo\nedits:\n  - replace: {{rollout: {rollout}}}\n")
    with pytest.raises(GraphError) as raised:
        compile_graph(str(path))
    lines = fitted(str(raised.value), 60).splitlines()
    (source,) = (line for line in lines if line.endswith("top_pp: 0.9}}"))
    (mark,) = (line for line in lines if line.endswith("^"))
    assert source[mark.index("^") :].startswith("top_pp")
    assert max(map(len, lines[lines.index(mark) + 1 :])) <= 60


@pytest.mark.parametrize("width", [80, 100])
def test_pools_have_lanes_and_bars_within_the_columns(tmp_path: Path, width: int) -> None:
    path = tmp_path / "ahead.yaml"
    path.write_text(AHEAD)
    plan = compile_graph(str(path), target=Target("h100-8"))
    styled = terminal_text(plan, width).partition("an iteration of the steady state: ")[2]
    lines = click.unstyle(styled).splitlines()
    assert all(len(line) <= width for line in lines)
    train, gen = lines[1:3]
    assert train.startswith("  train ") and train.count("upda") == 2 and "rollout" not in train
    assert gen.startswith("  gen ") and "rollout" in gen
    assert lines[3] == "memory of a device at its peak"
    assert lines[4].startswith("  train ") and " of 80 GB" in lines[4]
    assert plan.peak
    full = [line.count("█") / (line.count("█") + line.count("░")) for line in lines[4:6]]
    shares = [peak.bytes / peak.capacity for peak in plan.peak.values()]
    assert full == pytest.approx(shares, abs=0.03)


def shown_in_a_terminal(*words: str, expect: int = 0, **env: str) -> str:
    """What ``rlgraph`` with these words prints to a terminal."""
    own, theirs = pty.openpty()
    command = [sys.executable, "-m", "rlgraph", *words]
    with os.fdopen(own, "rb", buffering=0) as terminal:
        running = subprocess.Popen(command, stdout=theirs, env={**os.environ, "TERM": "xterm", **env})
        os.close(theirs)
        pieces = []
        while piece := _read(terminal.fileno()):
            pieces.append(piece)
        assert running.wait() == expect
    return b"".join(pieces).decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other side has closed it
        return b""


def test_a_terminal_gets_colours_unless_it_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plan = ("plan", "grpo", "--devices", "2")
    assert "\x1b[" in shown_in_a_terminal(*plan)
    plain = shown_in_a_terminal(*plan, NO_COLOR="1", COLUMNS="100").replace("\r\n", "\n")
    assert plain == fitted(plan_text(compile_graph("grpo", devices=2), width=100), 100)


@pytest.mark.parametrize("columns", ["0", "1", "8", "20"])
def test_a_terminal_may_be_narrower_than_a_lane(columns: str) -> None:
    shown = shown_in_a_terminal("plan", "grpo", "--cluster", "h100-8", COLUMNS=columns)
    assert "memory of a device at its peak" in click.unstyle(shown) and "Traceback" not in shown
