"""Answers and programs as users bring them to rewards: written down before the code was looked at."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlgraph.nodes.reward.judging import judge
from rlgraph.nodes.reward.text import overlap
from rlgraph.nodes.reward.verifier import verifier
from rlgraph.nodes.support.sandbox import MIB, Limits

pytestmark = pytest.mark.slow

# 8. reward.math says what its page says, whatever Math-Verify takes for granted: response, answer, right

MATH: dict[str, tuple[str, str, bool]] = {
    "an equation for a number": (r"\boxed{x=5}", "5", True),
    "apples": (r"\boxed{5\text{ apples}}", "5", True),
    "dollars and thousands": (r"\boxed{\$1,000.50}", "1000.5", True),
    "a half-open interval": (r"\boxed{(1,2]}", "(1,2]", True),
    "an open one for it": (r"\boxed{(1,2)}", "(1,2]", False),
    "a set in another order": (r"\boxed{\{1,2\}}", r"\{2,1\}", True),
    "a point in another order": (r"\boxed{(2,1)}", "(1,2)", False),
    "three digits of a third": (r"\boxed{0.333}", r"\frac{1}{3}", False),
    "three digits of pi": (r"\boxed{3.14}", r"\pi", False),
    "the other sign": (r"\boxed{-5}", "5", False),
    "infinity of the other sign": (r"\boxed{\infty}", r"-\infty", False),
    "one of two": (r"\boxed{5 \text{ or } 7}", "5", False),
    "a denial": (r"\boxed{\text{not 5}}", "5", False),
    "none for nought": (r"\boxed{\text{none}}", "0", False),
    "an empty box": (r"\boxed{}", "5", False),
    "a column in another order": (
        r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}",
        r"\begin{pmatrix}2\\1\end{pmatrix}",
        False,
    ),
    "sixteen digits": (r"\boxed{9999999999999999}", "10000000000000000", False),
    "a tower of powers": (r"\boxed{10^{10^{10}}}", "1", False),
    "a division by nought": (r"\boxed{\frac{3}{0}}", "3", False),
    "a corrected answer": ("5 is not it; it is 7", "5", False),
    "the time of day": (r"\boxed{12:30}", "12:30", True),
    "a half-line as an inequality": (r"\boxed{x>3}", r"(3,\infty)", True),
    "a closed half-line for an open one": (r"\boxed{x\ge3}", "x>3", False),
    "a variable with a subscript": (r"\boxed{x_{1}}", "x_1", True),
    "another subscript": (r"\boxed{x_1}", "x_2", False),
    "a letter that is a digit elsewhere": (r"\boxed{a_5}", "a_5", True),
    "a Fibonacci number by name": (r"\boxed{F_{10}}", "F_{10}", True),
    "a numeral in base 8": (r"\boxed{77_8}", "77_{8}", True),
    "a numeral in another base": (r"\boxed{77_8}", "77_9", False),
    "a date": (r"\boxed{\text{January 5}}", "January 5", True),
    "another date": (r"\boxed{\text{January 6}}", "January 5", False),
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    judges = verifier(2, 2**30)
    pairs = [(response, answer) for response, answer, _ in MATH.values()]
    said = judges.judge(pairs, 60.0, False)
    judges.close()
    return dict(zip(MATH, said, strict=True))


@pytest.mark.parametrize("situation", MATH)
def test_what_equals_an_answer(situation: str, verdicts: dict[str, str]) -> None:
    assert (verdicts[situation] == "right") == MATH[situation][2]


# SQuAD's own normalisation and overlap, by hand
@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("The Paris.", "paris", 1.0),
        ("U.S.A.", "USA", 1.0),
        ("New York City", "New York", 0.8),
        ("x y y", "y y x", 1.0),
        ("x x x", "x y", 0.4),
        ("Müller", "Muller", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1_as_squad_measures_it(response: str, answer: str, right: float) -> None:
    assert overlap(response, answer) == pytest.approx(right)


LIMITS = Limits(timeout=60.0, memory=1024 * MIB, file=MIB)


def cases(inputs: Any, outputs: Any, **more: Any) -> str:
    return json.dumps({"inputs": inputs, "outputs": outputs, **more})


SINGLE = cases([""], ["1"])
PROGRAMS: dict[str, tuple[str, str, bool | str]] = {
    "white space at the end of lines": ("print('1 ')\nprint()", SINGLE, True),
    "the line's end of another system": ("print('1\\r')", cases([""], ["1\r\n"]), True),
    "an input without a line's end": ("print(input())", cases(["5"], ["5"]), True),
    "an exit that says that all is well": ("import sys\nprint(1)\nsys.exit(0)", SINGLE, True),
    "an exit that says that it is not": ("import sys\nprint(1)\nsys.exit(1)", SINGLE, False),
    "words on the standard error": ("import sys\nprint(1)\nprint('x', file=sys.stderr)", SINGLE, True),
    "letters in another case": ("print('YES')", cases([""], ["Yes"]), False),
    "a guarded main program": ("if __name__ == '__main__':\n    print(1)", SINGLE, True),
    "an input that is changed": (
        "def f(a):\n    a.append(1)\n    return len(a)",
        cases([[[1]]], [2], fn_name="f"),
        True,
    ),
    "a function by another name": ("def g(a):\n    return 1", cases([[1]], [1], fn_name="f"), False),
    "a pair for a list": ("def f(a):\n    return (1, 2)", cases([[1]], [[1, 2]], fn_name="f"), True),
    "a test that is no Python": ("def f():\n    return 1", "assert f( == 1", "is neither Python nor JSON"),
    "JSON that breaks off": ("print(1)", '{"inputs": [""], "outputs"', "is neither Python nor JSON"),
    "an input too many": ("print(1)", cases(["", ""], ["1"]), "zip() argument 2 is shorter"),
    "an empty test": ("print(1)", "", "asks the program nothing"),
}


@pytest.mark.parametrize("situation", PROGRAMS)
def test_what_a_program_passes(situation: str) -> None:
    source, test, right = PROGRAMS[situation]
    verdict = judge(source, test, LIMITS)
    if isinstance(right, str):
        assert not verdict.passed and right in verdict.fault
    else:
        assert (verdict.passed, verdict.fault) == (right, "")
