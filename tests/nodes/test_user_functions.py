"""Functions of a user's may exit, be cancelled, use signals, be late or return odd things."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from recorded import means
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.toolbox import OfferedTool, Toolbox
from rlgraph.nodes.reward.functions import trl, verl
from rlgraph.nodes.reward.per_sample import RewardError, each
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.user_call import DaemonThreads, needs_main_thread
from rlgraph.ops import Context, Tool

LATE = "it took over 1 s"
ODD: dict[str, str] = {
    "SystemExit: 3": "import sys; sys.exit(3)",
    "SystemExit": "raise SystemExit",
    "CancelledError": "import asyncio; raise asyncio.CancelledError",
    "StopIteration": "next(iter(()))",
    "TimeoutError: of its own": "raise TimeoutError('of its own')",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "ValueError: no": "raise ValueError('no')",
    LATE: "import time; time.sleep(4.0)",
    "it gave None": "return None",
    "it gave [1.0]": "return [1.0]",
    "it gave '1.0'": "return '1.0'",
    "it gave nan": "return float('nan')",
    "it gave inf": "return float('inf')",
    "its dict has no 'score', only acc": "return {'acc': 1.0}",
    "it gave array([1., 2.])": "import numpy; return numpy.ones(2) + [0, 1]",
}
FINE: dict[str, float] = {
    "return 1": 1.0,
    "return True": 1.0,
    "import numpy; return numpy.float32(0.5)": 0.5,
    "import torch; return torch.tensor(0.25)": 0.25,
    "return {'score': 0.75, 'acc': 1}": 0.75,
}


def context(rows: int) -> Context:
    return Context("rewards", 0, 0, rows=range(rows), total_rows=rows)


def scorer(folder: Path, body: str, kind: str) -> str:
    """A file with a scorer whose second sample does something; kind is def, async def or late."""
    lines = [
        "if solution_str == 'odd':",
        *(f"    {part.strip()}" for part in body.split(";")),
        "return 0.125",
    ]
    inner = "\n    ".join(lines)
    start = "def inner" if kind == "hidden" else f"{kind} compute_score"
    text = f"{start}(data_source, solution_str, ground_truth, extra_info=None):\n    {inner}\n"
    if kind == "hidden":  # a function that is not async and returns an awaitable
        text = "async " + text + "\ndef compute_score(**row):\n    return inner(**row)\n"
    (folder / "scorer.py").write_text(text)
    return f"{folder}/scorer.py:compute_score"


def judged(
    target: str, on_error: Any = "zero", timeout: float = 60.0
) -> tuple[list[float], list[bool], Context]:
    ctx = context(3)
    responses = ["fine", "odd", "fine"]
    rewards, failed = verl(
        ctx, responses, ["1"] * 3, None, None, function=target, timeout=timeout, on_error=on_error
    )
    return rewards.tolist(), failed.tolist(), ctx


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["def", "async def", "hidden"])
@pytest.mark.parametrize("why", ODD)
def test_a_scorer_that_does_something_odd_fails_for_its_sample_alone(
    why: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = ODD[why]
    if kind != "def":
        if why == "KeyboardInterrupt":
            pytest.skip("in the main thread it is the user's Ctrl-C")
        if why == "StopIteration":
            why = "RuntimeError: coroutine raised StopIteration"
        body = body.replace("import time; time.sleep(4.0)", "import asyncio; await asyncio.sleep(4.0)")
    timeout = 1.0 if why == LATE else 60.0
    rewards, failed, ctx = judged(scorer(tmp_path, body, kind), timeout=timeout)
    assert rewards == [0.125, 0.0, 0.125]
    assert failed == [False, True, False]
    assert why in caplog.text
    assert means(ctx)["reward/failed"] == (1.0, 3)
    with pytest.raises(RewardError, match="1 requests for rewards failed"):
        judged(scorer(tmp_path, body, kind), "fail", timeout)


@pytest.mark.parametrize("kind", ["def", "async def", "hidden"])
@pytest.mark.parametrize("body", FINE)
def test_a_scorer_may_return_any_number(body: str, kind: str, tmp_path: Path) -> None:
    assert judged(scorer(tmp_path, body, kind))[0] == [0.125, FINE[body], 0.125]


def test_a_scorer_that_uses_signals_runs_in_the_main_thread(tmp_path: Path) -> None:
    text = """
    import signal

    def compute_score(data_source, solution_str, ground_truth):
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 5)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        return 1.0
    """
    (tmp_path / "scorer.py").write_text(textwrap.dedent(text))
    assert judged(f"{tmp_path}/scorer.py:compute_score", "fail")[0] == [1.0, 1.0, 1.0]


def test_a_scorer_in_the_main_thread_is_interrupted_when_it_is_late(tmp_path: Path) -> None:
    text = """
    import signal

    def compute_score(data_source, solution_str, ground_truth):
        while ground_truth == "1":
            try:
                sum(range(1000))
            except Exception:
                pass
        return 1.0
    """
    (tmp_path / "scorer.py").write_text(textwrap.dedent(text))
    before = signal.getsignal(signal.SIGUSR2)
    rewards, failed = verl(
        context(3),
        ["a", "b", "c"],
        ["0", "1", "0"],
        None,
        None,
        function=f"{tmp_path}/scorer.py:compute_score",
        on_error="zero",
        timeout=1.0,
    )
    assert (rewards.tolist(), failed.tolist()) == ([1.0, 0.0, 1.0], [False, True, False])
    assert signal.getsignal(signal.SIGUSR2) is before


def test_signals_behind_files_beside_a_scorer_are_found(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "scorer.py").write_text("from parts import limited\nimport scorer, json\n")
    (tmp_path / "parts/__init__.py").write_text("from . import limits\n")
    (tmp_path / "parts/limits.py").write_text("")
    assert not needs_main_thread(f"{tmp_path}/scorer.py")
    needs_main_thread.cache_clear()
    (tmp_path / "parts/limits.py").write_text("from signal import SIGALRM\n")
    assert needs_main_thread(f"{tmp_path}/scorer.py")


def test_math_verify_runs_as_it_comes(tmp_path: Path) -> None:
    """It stops itself by SIGALRM: in threads each call raised, and who caught that gave 0 for all."""
    text = """
    def compute_score(data_source, solution_str, ground_truth):
        from math_verify import parse, verify
        try:
            return float(verify(parse(ground_truth), parse(r"\\boxed{1}")))
        except Exception:
            return 0.0
    """
    (tmp_path / "scorer.py").write_text(textwrap.dedent(text))
    responses, ctx = ["a", "b"], context(2)
    rewards, _ = verl(
        ctx,
        responses,
        [r"\boxed{1}", r"\boxed{2}"],
        None,
        None,
        function=f"{tmp_path}/scorer.py:compute_score",
    )
    assert rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("import json\n", False),
        ("def f():\n    import signal\n", True),
        ("from math_verify.metric import x\n", True),
        ("from verl.utils.reward_score import default_compute_score as compute_score\n", True),
        ("import signals_of_mine\n", False),
    ],
)
def test_which_files_need_the_main_thread(text: str, needs: bool, tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(text)
    assert needs_main_thread(f"{tmp_path}/scorer.py") is needs


def test_an_op_of_the_users_may_give_numbers_of_numpy() -> None:
    rewards, failed = each(context(2), lambda x: numpy.float64(x), [{"x": 1}, {"x": 2}])
    assert (rewards.tolist(), failed.tolist()) == ([1.0, 2.0], [False, False])


TOKENS = Ragged.of([[1, 2], [3]], torch.int64)
MASK = Ragged.of([[False, True], [True]], torch.bool)


def scored_by_trl(folder: Path, body: str) -> list[float]:
    file = folder / f"scorer_{len(list(folder.iterdir()))}.py"  # a file is loaded once
    file.write_text(f"def score(prompts, completions, **more):\n    {body}\n")
    target = f"{file}:score"
    rewards, _ = trl(context(2), ["q", "r"], ["a", "b"], TOKENS, MASK, function=target)
    return list(rewards.tolist())


def test_a_function_of_trl_may_return_any_row_of_numbers(tmp_path: Path) -> None:
    assert scored_by_trl(tmp_path, "return [1, None]") == [1.0, 0.0]
    assert scored_by_trl(tmp_path, "import torch; return torch.tensor([0.5, float('nan')])") == [0.5, 0.0]
    assert scored_by_trl(tmp_path, "import numpy; return numpy.array([0.5, 0.25])") == [0.5, 0.25]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import sys; sys.exit(2)", "ended by SystemExit: 2"),
        ("return 1.0", "gave float: 1.0"),
        ("return {'score': 1}", "gave dict"),
        ("pass", "gave NoneType: end it with a return statement"),
        ("return ['1', '2']", "owes 2 finite numbers"),
        ("return [1.0]", "gave 1"),
        ("return [1.0, float('inf')]", "owes 2 finite numbers"),
    ],
)
def test_a_function_of_trl_that_gives_no_numbers_ends_the_run(body: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=why):
        scored_by_trl(tmp_path, body)


def test_a_function_of_trl_with_other_parameters_is_told_which_are_given(tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text("def score(a, b):\n    return [1.0, 1.0]\n")
    law = r"can't be called: .*'a'; it is called with prompts, completions, completion_ids.*\*\*kwargs"
    with pytest.raises(RewardError, match=law):
        trl(context(2), ["q", "r"], ["a", "b"], TOKENS, MASK, function=f"{tmp_path}/scorer.py:score")


def leave(code: int) -> str:
    """Leave the process.

    Args:
        code: its exit code.
    """
    sys.exit(code)


def give_up(code: int) -> str:
    """Be cancelled.

    Args:
        code: not used.
    """
    raise asyncio.CancelledError


async def leave_later(code: int) -> str:
    """Leave, in a coroutine.

    Args:
        code: its exit code.
    """
    raise SystemExit(code)


@pytest.mark.parametrize(
    ("tool", "answer"),
    [
        (leave, "error: SystemExit: 3"),
        (give_up, "error: CancelledError"),
        (leave_later, "error: SystemExit: 3"),
    ],
)
def test_a_tool_that_exits_is_an_error_that_the_policy_reads(tool: Any, answer: str) -> None:
    threads = DaemonThreads(1)
    box = Toolbox(OfferedTool.of({tool.__name__: Tool(tool, {}, {})}), 0, threads, 5.0)
    assert asyncio.run(box.run(ToolCall(tool.__name__, {"code": 3}))) == answer
    assert box.errors == 1
    threads.shutdown()


def test_a_process_ends_although_a_function_is_late(tmp_path: Path) -> None:
    text = """
    import time
    from rlgraph.nodes.reward.per_sample import each
    from rlgraph.ops import Context
    ctx = Context("rewards", 0, 0, rows=range(1), total_rows=1)
    print(each(ctx, lambda: time.sleep(60), [{}], "zero", timeout=0.1).failed.tolist())
    """
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "[True]\n", done.stderr
    assert time.monotonic() - since < 50


def test_threads_run_as_many_calls_as_they_may() -> None:
    threads = DaemonThreads(2)
    since = time.monotonic()
    futures = [threads.submit(time.sleep, 0.2) for _ in range(4)]
    for future in futures:
        future.result(timeout=10)
    assert len(threads._threads) == 2
    assert time.monotonic() - since >= 0.4
    threads.shutdown()
