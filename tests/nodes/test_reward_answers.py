"""Answers as models write them: what reward.math reads in a response, and what it pays."""

from __future__ import annotations

import pytest

from rlgraph.nodes.reward.equality import compare


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


RIGHT = [
    ("The answer is **18**.", "18"),
    ("Total = **18**", "18"),
    ("Therefore, the total is **18** apples.", "18"),
    ("**Answer: 18**", "18"),
    ("### Answer\n**18**", "18"),
    ("**18.5**", "18.5"),
    ("$\\boxed{1}$ and $\\boxed{-2}$", "1,-2"),
    ("The answers are $1$ and $-2$.", "1,-2"),
    (boxed("\\pm 2"), "2,-2"),
    (boxed("x=\\pm2"), "2,-2"),
    (boxed("1011_{2}"), "1011_2"),
    (boxed("1011_{(2)}"), "1011_2"),
    (boxed("11_{10}"), "11"),
    (boxed("x\\in(3,\\infty)"), "x>3"),
    (boxed("x\\in(-\\infty,-1)\\cup(1,\\infty)"), "(-\\infty,-1)\\cup(1,\\infty)"),
    (boxed("1.5\\times10^6"), "1500000"),
    (boxed("1.2\\times10^{-4}"), "0.00012"),
    (boxed("10^{-5}"), "0.00001"),
    (boxed("−5"), "-5"),
    (boxed("24\\pi\\approx 75.4"), "24\\pi"),
    (boxed("\\approx 12"), "12"),
    (boxed("\\sqrt2\\approx1.414"), "\\sqrt2"),
    (boxed("3 1/2"), "7/2"),
    (boxed("12\\,345"), "12345"),
    (boxed("3+4\\mathrm{i}"), "3+4i"),
    (boxed("12{,}345"), "12345"),
    ("<answer>7</answer>", "7"),
    ("<think>maybe 8</think> <answer>7</answer>", "7"),
    ("The answer is **1/2**.", "1/2"),
    ("*18*", "18"),
    ("Final answer: `18`", "18"),
    (boxed("5."), "5"),
    (boxed("\\frac\\pi4"), "\\frac{\\pi}{4}"),
    (boxed("12 \\text{ cm and } 13 \\text{ cm}"), "12,13"),
    (boxed("100, 200"), "100,200"),
    (boxed("0.333333"), "1/3"),
    (boxed("\\$18.00"), "18"),
    (boxed("50\\%"), "50"),
    (boxed("12.5\\%"), "12.5"),
    (boxed("6.63\\times10^{-34}"), "6.63\\times 10^{-34}"),
    (boxed("ACBD"), "ACBD"),
    ("The answer is 1 000 000.", "1000000"),
    ("\\boxed{1}. Wait, no. It is \\boxed{2}", "2"),
    ("<think>\\boxed{7}</think> The answer is 5.", "5"),
    ("a) \\boxed{3} b) \\boxed{5}", "5"),
    (boxed("90^\\circ"), "90"),
    ("She earns \\$18 per day", "18"),
    ("The answer is 18 dollars", "18"),
    ("The answer is A", "A"),
    ("\\boxed{\\text{(B)}}", "B"),
    (boxed("7:30"), "7:30"),
    ("#### 1,234", "1234"),
]
WRONG = [
    (boxed("7\\,-\\,10"), "-3"),
    (boxed("12\\,13"), "25"),
    (boxed("12\\;13"), "25"),
    (boxed("(12)13"), "25"),
    (boxed("{12}13"), "25"),
    (boxed("\\frac12\\frac13"), "1/6"),
    (boxed("50\\%120"), "60"),
    (boxed("120\\,50\\%"), "60"),
    (boxed("3 1/2"), "2"),
    (boxed("0.0000001"), "0.0000003"),
    (boxed("\\frac{1}{2^{98}}"), "\\frac{1}{2^{99}}"),
    ("<think>maybe \\boxed{5}</think> I give up.", "5"),
    ("\\boxed{1}, no: \\boxed{2}", "1"),
    (boxed("6.63\\times10^{-34}"), "1.38\\times10^{-23}"),
    (boxed("DBCA"), "ACBD"),
    (boxed("7"), "3+4i"),
    (boxed("5, 6"), "5"),
    ("The answer is 5 or 10", "5"),
    (boxed("1011_3"), "1011_2"),
    ("<think>it is 5", "5"),
    (boxed("0.666667"), "0.66667"),
    (boxed("1234567.1"), "1234567.2"),
]


@pytest.mark.parametrize(("response", "answer"), RIGHT)
def test_a_right_answer_is_paid_in_whatever_notation(response: str, answer: str) -> None:
    assert compare(response, answer, unevaluated=False) == "right"


@pytest.mark.parametrize(("response", "answer"), WRONG)
def test_a_wrong_or_unfinished_answer_is_not_paid(response: str, answer: str) -> None:
    assert compare(response, answer, unevaluated=False) in ("wrong", "unparsed", "unevaluated")


def test_any_of_several_references_counts() -> None:
    assert compare("\\boxed{5}", ["4", "5"], unevaluated=False) == "right"
    assert compare("\\boxed{6}", ["4", "5"], unevaluated=False) == "wrong"


@pytest.mark.parametrize("response", ["\\boxed{4, 5}", "\\boxed{4} or \\boxed{5}", "The answer is 4 or 5."])
def test_a_list_of_answers_catches_none(response: str) -> None:
    assert compare(response, "5", unevaluated=False) == "wrong"
