r"""Equality of mathematical answers, by Math-Verify, and whether an answer is computed to its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from rlgraph.nodes.reward.answer_text import answer_in, normal

Verdict = Literal["right", "wrong", "unparsed", "unevaluated", "late"]
DIGITS = 6  # significant digits from which a decimal stands for the number that it rounds or cuts off
RELATIVE = 1e-6  # of decimals that are part of a larger expression
BASE = re.compile(r"([0-9A-Za-z]+)_\{?\(?(\d+)\)?\}?")
LETTERS = re.compile(r"\(?([A-Za-z]{2,})\)?")
TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{\s*([^{}]*?)\s*\}")
# rules of the grammar of latex2sympy2_extended that are one operation each; of others it depends
ONE = {"binom", "abs_group", "floor_group", "ceil_group", "norm_group", "func", "det"}
SIGNED = {"additive", "mp", "mp_nofunc"}


def compare(response: str, answer: str | Sequence[str], unevaluated: bool) -> Verdict:
    """Compare a response's answer with the reference, or with several of which any counts. May take forever.

    Args:
        response: the text that ends in an answer.
        answer: the reference, as LaTeX, or a list of such.
        unevaluated: whether an answer that still has to be computed is right.
    """
    text = answer_in(response)
    if not text:
        return "unparsed"
    references = [answer] if isinstance(answer, str) else answer
    verdicts = {_compared(text, reference, unevaluated) for reference in references}
    best_first: tuple[Verdict, ...] = ("right", "unevaluated", "wrong")
    for verdict in best_first:
        if verdict in verdicts:
            return verdict
    return "unparsed"


def _compared(text: str, answer: str, unevaluated: bool) -> Verdict:
    reference = normal(answer)
    word = _word(reference)
    if word:
        return "right" if word == _word(text) else "wrong"
    if _plain(text) == _plain(reference):
        return "right"  # F_{10} is no numeral, and words with a number are no product
    based = _numeral(text), _numeral(reference)
    if any(based):
        return _in_bases(text, reference)
    if re.search(r"(?<![_\d])\d+\s+\d", text):
        return "unparsed"  # two numbers side by side, which Math-Verify adds up
    parsed = _parsed(text)
    if parsed is None:
        return "right" if text == reference else "unparsed"
    for reading in _readings(answer, reference):
        known = _parsed(reading)
        if known is not None and equal(known, parsed):
            finished = unevaluated or _is_evaluated(parsed, text, known, reading)
            return "right" if finished else "unevaluated"
    return "wrong"


def _plain(text: str) -> str:
    """Return a text without the commands that set it upright."""
    return TEXT.sub(r"\1", text).strip()


def _word(text: str) -> str:
    """Return a text that is letters alone and no product of unknowns, in lower case; nothing for another.

    Math-Verify takes ``ACBD`` for a product, equal to ``DBCA``. Lower-case letters in alphabetical order
    (``ab``, ``xyz``) are a product, as algebra writes it.
    """
    match = LETTERS.fullmatch(_plain(text).rstrip("."))
    if not match or (match[1].islower() and "".join(sorted(match[1])) == match[1]):
        return ""
    return match[1].lower()


def _readings(answer: str, reference: str) -> list[str]:
    """Return how a reference can be read: ``100,200`` is a number, or else a list of two."""
    grouped = re.fullmatch(r"\s*\d{1,3}(?:,\d{3})+\s*", answer)
    return [reference, answer.replace(",", ", ")] if grouped else [reference]


def _numeral(text: str) -> re.Match[str] | None:
    """Return a numeral with its base as a match, or nothing: the letter of ``x_1`` is no digit."""
    match = BASE.fullmatch(text)
    if match is None or not 2 <= int(match[2]) <= 36:
        return None
    try:
        int(match[1], int(match[2]))
    except ValueError:
        return None
    return match


def _in_bases(text: str, reference: str) -> Verdict:
    """Compare numerals of which one at least names its base; digits alone are in the base of the other."""
    ours, theirs = (_numeral(side) or re.fullmatch(r"([0-9A-Za-z]+)", side) for side in (text, reference))
    if not ours or not theirs:
        return "wrong"
    if ours.re is theirs.re:
        same = int(ours[1], int(ours[2])) == int(theirs[1], int(theirs[2]))
        return "right" if same and ours[2] == theirs[2] else "wrong"
    return "right" if ours[1].lower().lstrip("0") == theirs[1].lower().lstrip("0") else "wrong"


def _parsed(text: str) -> Any:
    """Return a normal answer as sympy's expression, or None."""
    from math_verify import LatexExtractionConfig, parse

    # factors side by side would be added where they are numbers
    explicit = (
        re.sub(r"(?<=[\d})])\s*(?=\()|(?<=\))\s*(?=\d)", r" \\cdot ", text) if _has_factors(text) else text
    )
    matches = parse(f"\\boxed{{{explicit}}}", [LatexExtractionConfig()], "no_fallback", parsing_timeout=None)
    return matches[0] if matches else None


def _has_factors(text: str) -> bool:
    """Return whether numbers stand side by side as factors: ``(12)(13)``, ``2(3)``."""
    return re.search(r"(?:\d|\d\))\s*\(\s*-?[\d.]+\s*\)|\(\s*-?[\d.]+\s*\)\s*\d", text) is not None


def equal(known: Any, parsed: Any) -> bool:
    """Return whether two expressions are equal; numbers by our tolerance, all else as Math-Verify says."""
    from math_verify import verify
    from sympy import FiniteSet, MatrixBase, Set, Tuple

    known, parsed = _without_name(_alone(known)), _without_name(_alone(parsed))
    if isinstance(known, FiniteSet) and isinstance(parsed, FiniteSet):
        unmatched = list(parsed.args)
        if len(unmatched) != len(known.args):
            return False
        for element in known.args:
            match = next((candidate for candidate in unmatched if equal(element, candidate)), None)
            if match is None:
                return False
            unmatched.remove(match)
        return True
    if isinstance(known, Tuple) and isinstance(parsed, Tuple):
        return len(known) == len(parsed) and all(map(equal, known, parsed))
    if isinstance(known, MatrixBase) and isinstance(parsed, MatrixBase):
        return known.shape == parsed.shape and all(map(equal, known.flat(), parsed.flat()))
    if _is_number(known) and _is_number(parsed):
        return any(_same(a, b) for a in _values(known) for b in _values(parsed))
    solved = isinstance(known, Set) and _is_solved(parsed)
    return bool(verify([known], [parsed], timeout_seconds=None, allow_set_relation_comp=solved))


def _is_solved(expression: Any) -> bool:
    """Return whether an inequality says where one unknown lies: ``x>3`` or ``1<x<2``, and not ``x^2>9``."""
    from sympy import And, Symbol
    from sympy.core.relational import Relational

    parts = expression.args if isinstance(expression, And) else [expression]
    if not all(isinstance(part, Relational) for part in parts):
        return False
    sides = [side for part in parts for side in part.args]
    unknowns = {side for side in sides if isinstance(side, Symbol)}
    return len(unknowns) == 1 and all(side in unknowns or not side.free_symbols for side in sides)


def _without_name(expression: Any) -> Any:
    """Return the last side of ``x = 5``; other relations as they are."""
    from sympy import Eq, Symbol

    assignment = isinstance(expression, Eq) and isinstance(expression.lhs, Symbol)
    return expression.rhs if assignment else expression


def _alone(expression: Any) -> Any:
    """Return the only element of a set that has one: ``{5}`` is 5."""
    from sympy import FiniteSet

    alone = isinstance(expression, FiniteSet) and len(expression.args) == 1
    return expression.args[0] if alone else expression


def _is_number(expression: Any) -> bool:
    from sympy import Expr, Symbol

    return isinstance(expression, Expr) and {str(s) for s in expression.atoms(Symbol)} <= {"i"}


def _values(expression: Any) -> list[Any]:
    """Return the values of a number: ``50\\%`` is 0.5, and 50 where percent are what was asked for."""
    from sympy import I, Rational, UnevaluatedExpr

    expression = expression.subs(dict.fromkeys(expression.free_symbols, I))
    percent = UnevaluatedExpr(Rational(1, 100))
    in_front = expression.subs(percent, 1).doit() if expression.has(percent) else None
    value = expression.doit()
    return [value] if in_front is None else [value, in_front]


def _same(a: Any, b: Any) -> bool:
    """Return whether two numbers are equal: exactly, or as far as a decimal of six digits goes."""
    from sympy import Abs, Float, N, Rational, simplify

    if a == b:
        return True
    if not a.is_finite or not b.is_finite:
        return False
    decimals = [number for number in (a, b) if isinstance(number, Float)]
    # a decimal is what it shows, not the binary number nearest to it
    high_a, high_b = (N(Rational(str(x)) if isinstance(x, Float) else x, 40) for x in (a, b))
    difference, size = Abs(high_a - high_b), max(Abs(high_a), Abs(high_b))
    if not decimals:
        inexact = a.has(Float) or b.has(Float)
        if difference > size * (RELATIVE if inexact else 1e-25):
            return False
        return inexact or bool(simplify(a - b) == 0) or bool(difference <= size * 1e-30)
    if len(decimals) == 2 or Rational(str(decimals[0])).is_integer:
        exact = [Rational(str(number)) if isinstance(number, Float) else number for number in (a, b)]
        if exact[0] == exact[1]:
            return True
    places = []
    for number in decimals:
        if _digits(number) < DIGITS:
            return bool(difference <= size * 1e-12)
        places.append(_place(number))
    return bool(difference < max(places) * (1 - Rational(1, 10**9)))


def _rendered(number: Any) -> tuple[str, int]:
    """Return the digits that a decimal shows, and the power of ten of the last."""
    from decimal import Decimal

    _, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    return "".join(map(str, digits)), int(exponent)


def _digits(number: Any) -> int:
    return len(_rendered(number)[0])


def _place(number: Any) -> Any:
    from sympy import Rational

    return Rational(10) ** _rendered(number)[1]


def _is_evaluated(parsed: Any, text: str, known: Any, reference: str) -> bool:
    """Return whether an answer has no more operations than its own value has, or than the reference.

    With unknowns in it, those of the expression are counted, else those of the text's parse tree, as
    Math-Verify's parser evaluates some numbers on its own.
    """
    from sympy import Expr, I, count_ops, expand, latex

    side = getattr(parsed, "rhs", parsed)
    value = side.doit()
    unknowns = {str(symbol) for symbol in side.free_symbols}
    if unknowns - {"i"}:
        return bool(count_ops(side) <= max(count_ops(value), count_ops(known)))
    if unknowns and isinstance(side, Expr):
        value = expand(value.subs(dict.fromkeys(side.free_symbols, I)), complex=True)
    return operations(text) <= max(operations(normal(latex(value))), operations(reference))


def operations(text: str) -> int:
    r"""Return how many operations the parse tree of LaTeX has; a fraction that has to stay is none.

    Of an equation the last side counts.

    Example:
        >>> [operations(text) for text in ("-156", "12*13", "(12)(13)", "7-10", r"\frac{1}{2}", "4/2", "x=3")]
        [0, 1, 1, 1, 0, 1, 0]
    """
    from antlr4 import CommonTokenStream, InputStream
    from latex2sympy2_extended.antlr_parser import PSLexer, PSParser

    lexer = PSLexer(InputStream(text))
    lexer.removeErrorListeners()
    parser = PSParser(CommonTokenStream(lexer))
    parser.removeErrorListeners()
    return _count(parser.math(), parser)


def _count(node: Any, parser: Any) -> int:
    children = list(getattr(node, "children", None) or [])
    if not children:
        return 0
    rule = parser.ruleNames[node.getRuleIndex()]
    names = []
    for child in children:
        is_token = hasattr(child, "symbol")
        names.append(parser.symbolicNames[child.symbol.type] if is_token else "")
    is_equation = "ASSIGNMENT" in names or "EQUAL" in names
    if is_equation and rule in ("relation", "set_elements_relation", "equality"):
        return _count(children[-1], parser)
    inside = sum(_count(child, parser) for child in children)
    if rule in SIGNED and len(children) == 3:
        is_division = names[1] in ("DIV", "COLON")
        return inside + (_ratio(children[0], children[2]) if is_division else 1)
    if rule == "frac":
        text = node.getText()
        fraction_parts = re.fullmatch(r"\\frac\{(.*)\}\{(.*)\}", text)
        if fraction_parts is None:
            return inside + 1
        numerator, denominator = fraction_parts.groups()
        return inside + _operations_of_fraction(numerator, denominator)
    if rule == "unary":
        numbers = [re.fullmatch(r"[\d.{}()\\%]+|\\frac\{\d+\}\{\d+\}", child.getText()) for child in children]
        return inside + sum(bool(a and b) for a, b in pairwise(numbers))
    return inside + (rule in ONE or "CARET" in names or "BANG" in names)


def _ratio(numerator: Any, denominator: Any) -> int:
    return _operations_of_fraction(numerator.getText(), denominator.getText())


def _operations_of_fraction(numerator: str, denominator: str) -> int:
    """Return 0 for a fraction of two integers that has to stay, and 1 for any other: that can be computed."""
    if not re.fullmatch(r"-?\d+", numerator) or not re.fullmatch(r"-?\d+", denominator):
        return 1
    has_to_stay = int(denominator) != 0 and int(numerator) % int(denominator) != 0
    return 0 if has_to_stay else 1
