"""Programs that are run against a test: which pass, and what stops those that would not end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlgraph.nodes.reward.code import MIB, Limits, code, passes, program
from rlgraph.nodes.support import sandbox
from rlgraph.nodes.support.sandbox import CHILD, NoNetworkError, isolates
from rlgraph.ops import Context

LIMITS = Limits(timeout=60.0, memory=1024 * MIB, file=1 * MIB, network=True)
TEST = "assert double(3) == 6"


def state(pid: int) -> str:
    """A process's state as Linux names it: Z is a zombie, X one that is gone."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "X"
    return status.rpartition(")")[2].split()[0]


def context() -> Context:
    return Context(node="rewards", seed=0, iteration=0)


def test_the_last_block_of_a_response_is_its_program() -> None:
    ctx = context()
    responses = [
        "```python\ndef double(x):\n    return 2 * x\n```",
        "First ```py\ndouble = None\n``` and better:\n```\ndef double(x): return x + x\n```\nDone.",
        "def double(x): return x * 2",
        "```python\ndef double(x): return x\n```",
        "no program at all",
        "",
    ]
    out = code(ctx, responses, [TEST] * 6, network=True, timeout=60.0)
    assert out.tolist() == [1, 1, 1, 0, 0, 0]
    assert ctx.metrics == {"reward/mean": (3.0, 6), "reward/late": (0.0, 6)}


def test_a_block_that_is_not_closed_is_no_block() -> None:
    assert program("```python\nx = 1") == "```python\nx = 1"


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('x' * 32)",
        "import os; os.write(1, b'0' * 32)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.execv('/bin/true', ['true'])",
    ],
)
def test_ending_early_is_not_passing(source: str) -> None:
    assert passes(source, "assert False", LIMITS) is False


def test_what_does_not_end_is_stopped() -> None:
    assert passes("while True: pass", "", Limits(1.0, 1024 * MIB, MIB, True)) is None
    ctx = context()
    assert code(ctx, ["import time; time.sleep(600)"], [""], network=True, timeout=1.0).tolist() == [0.0]
    assert ctx.metrics["reward/late"] == (1.0, 1)


def test_what_it_starts_is_stopped_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    source = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(note)!r}, "w").write(str(child.pid))
"""
    assert passes(source, "", LIMITS) is True
    pid, waits = int(note.read_text()), 0
    while state(pid) not in "ZX":  # a killed process takes a moment to end
        time.sleep(0.05)
        waits += 1
        assert waits < 400


def test_memory_and_files_are_limited() -> None:
    assert passes("x = bytearray(600 * 2**20)", "", LIMITS) is True
    assert passes("x = bytearray(2000 * 2**20)", "", LIMITS) is False
    write = "open('out', 'wb').write(bytes({}))"
    assert passes(write.format(2**19), "import os; assert os.path.getsize('out') == 2**19", LIMITS) is True
    assert passes(write.format(2**21), "", LIMITS) is False
    assert passes("files = [open('/dev/null') for _ in range(100)]", "", LIMITS) is False


def test_it_runs_in_an_empty_folder_without_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "1")
    before = os.listdir()
    look = "import os; assert os.listdir() == [] and 'A_SECRET' not in os.environ; open('left', 'w')"
    assert passes(look, "", LIMITS) is True
    assert os.listdir() == before


def test_without_network_nothing_is_reached_or_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # an address of this machine that is always there, but in a network of its own
    connect = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))"
    assert code(context(), [connect], [""], network=True, timeout=60.0).tolist() == [1.0]
    if isolates():
        assert code(context(), [connect, "x = 1"], [""] * 2, timeout=60.0).tolist() == [0.0, 1.0]
    monkeypatch.setattr(sandbox, "isolates", lambda: False)
    with pytest.raises(NoNetworkError, match="set network: true"):
        code(context(), ["x = 1"], [""])


def test_the_child_runs_without_the_package() -> None:
    script = f"import runpy, sys; runpy.run_path({CHILD!r}); assert 'rlgraph' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", script], check=True)


def test_of_no_samples() -> None:
    assert code(context(), [], [], network=True).tolist() == []
