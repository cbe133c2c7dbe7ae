r"""Equality of mathematical answers, by Math-Verify, and whether an answer is computed to its end."""

import re
from typing import Any, Literal

Verdict = Literal["right", "wrong", "unparsed", "unevaluated", "late"]
FRACTION = re.compile(r"\\[dtc]?frac\{([^{}]*)\}\{([^{}]*)\}")
RATIO = re.compile(r"(?<![\d.])(\d+) */ *(\d+)(?![\d.])")
# commands that only say what something looks like
LOOKS = re.compile(
    r"\\(left|right|[bB]igg?[lr]?|text|math[a-z]+|displaystyle|q?quad|begin|end)\b|\^\{?\\circ\}?"
)
# commands, signs, two numbers side by side (which Math-Verify adds up), and a minus behind something
OPERATION = re.compile(r"\\[a-zA-Z]+|[+*/^!|:]|[^\x00-\x7f]|(?<=[\w)}])\s*(?:-|[({])|(?<=\d)\s+(?=\d)")


def compare(response: str, answer: str, unevaluated: bool) -> Verdict:
    """Compare a response's answer with the reference. May take forever.

    Args:
        response: the text that ends in an answer.
        answer: the reference, as LaTeX.
        unevaluated: whether an answer that still has to be computed is right.
    """
    from math_verify import parse, verify

    parsed = parse(response, parsing_timeout=None)
    if not parsed:
        return "unparsed"
    reference = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not verify(reference, parsed, timeout_seconds=None):
        return "wrong"
    return "right" if unevaluated or _is_evaluated(parsed, reference, answer) else "unevaluated"


def _is_evaluated(parsed: list[Any], reference: list[Any], answer: str) -> bool:
    """Return whether an answer has no more operations than its own value has, or than the reference.

    With unknowns in it, those of the expression are counted; else those of the text, as Math-Verify's parser
    evaluates some numbers on its own. ``parsed`` is an expression, if there is one, and its text.
    """
    from sympy import count_ops, latex

    *expressions, text = parsed
    for expression in expressions:
        side = getattr(expression, "rhs", expression)
        value = side.doit()
        if side.free_symbols:
            allowed = [value, *(known for known in reference if not isinstance(known, str))]
            if count_ops(side) > max(map(count_ops, allowed)):
                return False
        elif operations(text.rpartition("=")[2]) > max(operations(latex(value)), operations(answer)):
            return False
    return True


def operations(text: str) -> int:
    r"""Return how many operations are written in a text, LaTeX or not; a fraction that has to stay is none.

    Example:
        >>> [operations(text) for text in ("-156", "12*13", "(12)(13)", "7-10", r"\frac{1}{2}", "4/2")]
        [0, 1, 1, 1, 0, 1]
    """
    before = None
    while text != before:
        before, text = text, FRACTION.sub(r" \1/\2", text)
    return len(OPERATION.findall(LOOKS.sub("", RATIO.sub(_ratio, text))))


def _ratio(match: re.Match[str]) -> str:
    """Return a letter for a fraction; one that is a whole number, or nothing, stays as it is."""
    above, below = int(match[1]), int(match[2])
    return "r" if below and above % below else match[0]
