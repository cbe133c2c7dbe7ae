"""What Math-Verify 0.9.0 (with latex2sympy2_extended 1.11.0) does that a good guess misses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from math_verify import parse, verify

pytestmark = pytest.mark.nightly


def box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_the_versions_are_those_that_were_tried() -> None:
    assert (version("math-verify"), version("latex2sympy2_extended")) == ("0.9.0", "1.11.0")


# kind: [(reference, response, what Math-Verify says)]
FACTS = {
    "a bare number in plain text needs blanks around it": [
        ("7", "<answer>7</answer>", False),
        ("7", "<answer> 7 </answer>", True),
        ("8", "<think>maybe 8</think> <answer>7</answer>", True),
        ("18", "*18*", False),
        ("18", "Final answer: `18`", False),
        ("1/2", "The answer is **1/2**.", False),
        ("1", "The answer is **1/2**.", True),
    ],
    "numbers side by side are added": [
        ("$12345$", box(r"12\,345"), False),
        ("$357$", box(r"12\,345"), True),
        ("$12345$", box("12 345"), False),
        (r"$\frac{7}{2}$", box("3 1/2"), False),
        ("$2$", box("3 1/2"), True),
        ("$25$", box("(12)(13)"), True),
        ("$5$", box("2(3)"), True),
        ("$0$", box(r"1\,000"), True),
    ],
    "orders of letters are products": [
        ("$ACBD$", box("DBCA"), True),
        ("$east$", box("seat"), True),
        (r"$\text{ACBD}$", box("DBCA"), False),
    ],
    "tiny numbers are equal": [
        (r"$6.63\times10^{-34}$", box(r"1.38\times10^{-23}"), True),
        (r"$1.6\times10^{-19}$", box(r"-1.6\times10^{-19}"), True),
        (r"$3\times10^{-7}$", box(r"4\times10^{-7}"), False),
        ("$0.0000003$", box("0.0000004"), True),
    ],
    "upright letters are units, and i is a symbol": [
        ("$3+4i$", box(r"3+4\mathrm{i}"), False),
        ("$7$", box(r"3+4\mathrm{i}"), True),
        ("$2$", box(r"2\mathrm{e}"), True),
        ("$-1$", box("i^2"), False),
    ],
    "corrections and thinking are judged with the answer": [
        ("$7$", r"<think>\boxed{7}</think> The answer is 5.", True),
        ("$5$", r"<think>\boxed{7}</think> The answer is 5.", False),
        ("$2$", r"\boxed{1}. Wait, no. It is \boxed{2}", False),
    ],
    "some notations are not read": [
        ("$1500000$", box("1.5e6"), False),
        (r"$\frac{\pi}{4}$", box(r"\frac\pi4"), False),
    ],
    "an inequality for an interval is no answer unless it is asked for": [
        (r"$(3,\infty)$", box("x>3"), False),
        ("$x>3$", box(r"(3,\infty)"), True),
    ],
}
ROWS = [(kind, *row) for kind, rows in FACTS.items() for row in rows]


@pytest.mark.parametrize(("kind", "reference", "response", "said"), ROWS)
def test_a_fact_holds(kind: str, reference: str, response: str, said: bool) -> None:
    assert verify(parse(reference), parse(response)) is said, kind


@pytest.mark.parametrize(("work", "value"), [(r"\binom{5}{2}", "10"), (r"12\div4", "3")])
def test_parsing_evaluates_some_operations(work: str, value: str) -> None:
    assert str(parse(box(work))[0]) == value


def test_an_inequality_is_an_interval_where_it_is_asked_for() -> None:
    reference, response = parse(r"$(3,\infty)$"), parse(box("x>3"))
    assert verify(reference, response, allow_set_relation_comp=True)
