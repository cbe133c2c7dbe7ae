"""Programs that are run against a test: which pass, and what a test of either kind may say."""

from __future__ import annotations

import json
import os
import resource

import pytest

from recorded import means
from rlgraph.nodes.reward import judging
from rlgraph.nodes.reward.code import code, program
from rlgraph.nodes.reward.judging import Judgement, judge, same_output
from rlgraph.nodes.reward.suspicious import is_suspicious
from rlgraph.nodes.support import sandbox
from rlgraph.nodes.support.sandbox import MIB, Limits, NoSandboxError
from rlgraph.ops import Context

LIMITS = Limits(timeout=60.0, memory=1024 * MIB, file=MIB)
TEST = "assert double(3) == 6"


def context() -> Context:
    return Context(node="rewards", seed=0, iteration=0)


def cases(inputs: list[object], outputs: list[object], **name: str) -> str:
    return json.dumps({"inputs": inputs, "outputs": outputs, **name})


def passes(source: str, answer: str) -> bool | None:
    return judge(source, answer, LIMITS).passed


def test_the_last_block_of_a_response_is_its_program() -> None:
    ctx = context()
    responses = [
        "```python\ndef double(x):\n    return 2 * x\n```",
        "First ```py\ndouble = None\n``` and better:\n```\ndef double(x): return x + x\n```\nDone.",
        "def double(x): return x * 2",
        "```python\ndef double(x): return x\n```",
        "no program at all",
        "",
        "import gc\ndef double(x): return 6",
    ]
    out = code(ctx, responses, [TEST] * 7, allow_unsandboxed=True, timeout=60.0)
    assert out.tolist() == [1, 1, 1, 0, 0, 0, 1]
    assert means(ctx) == {
        "reward/mean": (4.0, 7),
        "reward/late": (0.0, 7),
        "reward/suspicious": (1.0, 7),
        "reward/unjudged": (0.0, 7),
    }


def test_a_block_that_is_not_closed_is_no_block() -> None:
    assert program("```python\nx = 1") == "```python\nx = 1"


def test_what_does_not_end_is_stopped() -> None:
    ctx = context()
    responses = ["import time; time.sleep(600)", "def f():\n    while True: pass"]
    assert code(ctx, responses, ["", "f()"], allow_unsandboxed=True, timeout=1.0).tolist() == [0.0, 0.0]
    assert means(ctx)["reward/late"] == (2.0, 2)


@pytest.mark.parametrize("name", [{}, {"fn_name": "f"}])
def test_a_program_that_does_not_read_holds_up_nothing(name: dict[str, str]) -> None:
    big = cases([["x" * 2**22]], ["x"], **name)
    verdict = judge("import time; time.sleep(600)", big, Limits(1.0, 1024 * MIB, MIB))
    assert verdict in (Judgement(None), Judgement(False))  # late; or its input is more than it may write


def test_of_no_samples() -> None:
    assert code(context(), [], [], allow_unsandboxed=True).tolist() == []


def test_without_a_sandbox_nothing_runs_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "trouble", lambda: "unshare failed")
    with pytest.raises(NoSandboxError, match=r"unshare failed; .* set allow_unsandboxed: true: .* API keys"):
        code(context(), ["x = 1"], [""])
    assert code(context(), ["x = 1", "x = 2"], ["assert x == 1"] * 2, allow_unsandboxed=True).tolist() == [
        1,
        0,
    ]


def test_inputs_and_outputs() -> None:
    double = "print(2 * int(input()))"
    assert passes(double, cases(["3\n", "4"], ["6", "8\n"])) is True
    assert passes(double, cases([["3", "x"]], [["6"]])) is True  # as APPS has some: a list of lines
    assert passes(double, cases(["3", "4"], ["6", "9"])) is False
    assert passes(double, cases(["3", "x"], ["6", "6"])) is False  # it raises
    assert passes(f"{double}; import sys; sys.exit(1)", cases(["3"], ["6"])) is False
    assert passes(double, cases([], [])) is False
    assert passes(double, cases(["3"], [])) is False


def test_calls_with_json() -> None:
    pair = "def pair(x, y=2): return x, {y: [x / 2]}"
    assert passes(pair, cases([[1], [3, 4]], [[1, {"2": [0.5]}], [3, {"4": [1.5]}]], fn_name="pair")) is True
    assert passes(pair, cases(["1\n4"], ['[1, {"4": [0.5]}]'], fn_name="pair")) is True  # LiveCodeBench
    method = "class Solution:\n    def add(self, x, y): return x + y"
    assert passes(method, cases([[1, 2], [[1], [2]]], [[3], [1, 2]], fn_name="add")) is True
    assert passes(method, cases([[1, 2]], [4], fn_name="add")) is False
    for value in ("{1}", "b''", "object()", "float('nan')", "1 / 0", "print", "None"):
        assert passes(f"def f(): return {value}", cases([[]], [1], fn_name="f")) is False
    assert passes("x = 1", cases([[]], [1], fn_name="f")) is False
    assert passes(
        "import numpy as np\ndef f(x): return np.cumsum(x)", cases([[[1, 2]]], [[1, 3]], fn_name="f")
    )


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("a  \nb\n\n", "a\nb", True),
        ("a\n\nb", "a\nb", False),
        (" a b", "a  b", True),
        ("a\nb", "a b", False),
        ("ab", "a b", False),
        ("1.0000001", "1.0", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("1.001", "1.0", False),
        ("nan", "1.0", False),
        ("x", "1.0", False),
        ("9007199254740993", "9007199254740992", False),
        ("", "", True),
    ],
)
def test_outputs_that_are_the_same(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    "test",
    [
        "assert f(2",
        "assert nothing(2) == 4",
        "f(lambda x: x)",
        "f(object())",
        "raise SystemExit(0)",
        "import sys; sys.exit(0)",
        "assert f(2) == 5",
        "assert not f(2)",
        "f(2) + f",
        "assert f < 3",
    ],
)
def test_a_test_that_fails_is_not_passed(test: str) -> None:
    assert passes("def f(x): return 4", test) is False


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("import time, os\ndef f(): os._exit(0)", "try:\n    f()\nexcept BaseException:\n    pass"),
        ("def f(): return 3", "try:\n    assert f() == 4\nfinally:\n    pass"),
        ("1 / 0", ""),
        ("def f(:", ""),
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 3, [1, 2]))"),
        ("def f(): raise KeyError", "try:\n    f()\nexcept ValueError:\n    pass"),
    ],
)
def test_a_test_can_not_forgive_a_program_its_end(source: str, test: str) -> None:
    assert passes(source, test) is False


@pytest.mark.parametrize(
    "test",
    [
        "",
        "def check(candidate):\n    assert candidate(2, 3) == 5",
        "def test_add():\n    assert add(2, 3) == 5",
        "import unittest\nclass A(unittest.TestCase):\n    def test(self): self.assertEqual(add(2, 3), 5)",
        "def test_constant():\n    assert PI == 3",
        "assert sum([1, 2]) == max(3, 2)",
        "import math\nassert math.isclose(1, 1)",
    ],
)
def test_a_test_that_asks_nothing_is_passed_by_nobody(test: str) -> None:
    verdict = judge("def add(a, b): return a + b\nPI = 3", test, LIMITS)
    assert verdict == Judgement(False, fault="the test comes to its end and asks the program nothing")


def test_what_a_test_can_not_do_is_its_fault_or_an_error() -> None:
    program = "def f(*given): pass"
    verdict = judge(program, "try:\n    f(lambda x: x)\nexcept BaseException:\n    pass", LIMITS)
    assert verdict.passed is False and "the test passes a function" in verdict.fault
    copied = "import copy\ntry:\n    copy.deepcopy(f)\nexcept TypeError:\n    f()"
    assert passes(program, copied) is True
    failing = "import unittest\nclass F(unittest.TestCase):\n    def test(self): self.assertTrue(f())\n"
    failing += "unittest.main()"
    assert judge(program, failing, LIMITS) == Judgement(False)
    assert passes(program, "import sys\nf()\nsys.exit(1)") is False
    assert passes("def f(): raise SystemExit(0)", "f()") is False


def test_what_could_not_be_judged_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    ctx = context()
    code(ctx, ["x = 1"] * 3, ["", "assert x == 1", ""], allow_unsandboxed=True, timeout=60.0)
    assert means(ctx)["reward/unjudged"] == (2.0, 3)
    assert "2 of 3 responses could not be judged" in caplog.text and "asks the program nothing" in caplog.text


@pytest.mark.parametrize(
    ("right", "wrong", "test"),
    [
        ("def sum(xs): return 7", "", "assert sum([x for x in range(3)]) == 7"),
        ("def sum(xs): return 3", "", "assert sum([x for x in range(3)]) == 3"),
        ("def abs(x): return x if x > 0 else -x", "abs = lambda *_: 0", "assert abs(-3) == 3"),
        ("max = 3", "max = 4", "def f():\n    assert max == 3\nf()"),
        ("def add(a, b): return a + b", "abs = lambda *_: 0", "assert abs(add(1, 2) - 3) < 1"),
        ("def range(n): return [n]", "", "assert range(3) == [3]"),
    ],
)
def test_a_function_that_is_named_like_a_built_in_is_the_program_s(right: str, wrong: str, test: str) -> None:
    assert passes(right, test) is True
    assert passes(wrong, test) is False


def test_a_failure_of_the_judge_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("of the judge")

    with monkeypatch.context() as patch:
        patch.setattr(judging, "confined", fails)
        assert judge("x = 1", "assert x == 1", LIMITS) == Judgement(False, fault="ValueError: of the judge")
    assert judge("x = 1", "assert x == 1", LIMITS) == Judgement(True)


def test_a_fault_of_the_host_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "SANDBOXED", "/no/such/folder")
        with pytest.raises(NoSandboxError, match=r"a sandbox did not start: .*/no/such/folder"):
            judge("x = 1", "assert x == 1", LIMITS)
    with monkeypatch.context() as patch:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.dup(0))  # the lowest number that no file has
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limit[1]))
        try:
            with pytest.raises(NoSandboxError, match="Too many open files"):
                judge("x = 1", cases(["1"], ["1"]), LIMITS)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.parametrize("inputs", [[[1, 2]], [3], [None]])
def test_cases_that_are_no_text_are_a_fault_of_the_test(inputs: list[object]) -> None:
    verdict = judge("print(3)", cases(inputs, ["3"]), LIMITS)
    assert verdict.passed is False and "TypeError" in verdict.fault


@pytest.mark.parametrize(
    "source",
    [
        "import ctypes",
        "from inspect import stack",
        "import sys; sys._getframe()",
        "import os; os.kill(1, 9)",
        "open('/proc/self/mem')",
        "import json; json.dumps = None",
        "class A:\n    def __eq__(self, other): return True",
        "class A:\n    __eq__ = lambda *given: True",
    ],
)
def test_what_is_suspicious(source: str) -> None:
    assert is_suspicious(source)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "def f(:",
        "(" * 10_000,
        "-" * 100_000 + "1",
        "x = '\\d'",
        "import sys, re, os.path\nsys.setrecursionlimit(10**6)\nread = sys.stdin.readline\nre.compile('a')",
        "import sys, io\nsys.stdin = io.StringIO('a')",
        "class A:\n    def __eq__(self, other): return self.x == other.x",
        "class A:\n    kind = 3\n    def __init__(self): self.kind = type(self).__name__",
    ],
)
def test_what_is_not(source: str) -> None:
    assert not is_suspicious(source)


@pytest.mark.parametrize(
    "source",
    [
        "class Solution:\n    def f(self, x: List[int]) -> int: return sum(x)",
        "def f(x: Optional[List[int]]): return heapq.nsmallest(1, x)[0] + max(x)",
        "def f(x): return sum(Counter(x).elements())",
        "def f(x): return math.gcd(*x) * reduce(lambda a, b: a + b, x)",
        "def f(x): return sum(accumulate(x)) - bisect_left(x, 2)",
    ],
)
def test_a_program_has_the_names_that_harnesses_import(source: str) -> None:
    assert passes(source, cases([[[1, 2]]], [3], fn_name="f")) is True


def test_a_name_that_no_harness_has_is_an_error() -> None:
    assert passes("def f(x): return nosuch(x)", cases([[[1, 2]]], [3], fn_name="f")) is False


def test_nan_equals_nothing() -> None:
    assert passes("print(float('nan'))", cases([""], ["nan"])) is False


def test_a_block_of_another_language_or_in_thinking_is_no_program() -> None:
    assert program("```python\nx = 1\n```\nIt prints\n```text\n2\n```") == "x = 1\n"
    assert program("<think>```python\nx = 1\n```</think>```py\nx = 2\n```") == "x = 2\n"
