r"""Equality of mathematical answers, by Math-Verify, and whether an answer is computed to its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, Literal

from rlgraph.nodes.reward.answer_text import answer_in, normal

Verdict = Literal["right", "wrong", "unparsed", "unevaluated", "late"]
DIGITS = 6  # significant digits from which a decimal stands for the number that it rounds or cuts off
RELATIVE = 1e-6  # of decimals that are part of a larger expression
BASE = re.compile(r"([0-9A-Za-z]+)_\{?\(?(\d+)\)?\}?")
LETTERS = re.compile(r"\(?([A-Za-z]{2,})\)?")
TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{\s*([^{}]*?)\s*\}")
NUMBER = re.compile(r"[\d.{}()\\%]+|\\frac\{\d+\}\{\d+\}")
# rules of the grammar of latex2sympy2_extended: of one operation, of two operands and a sign, of equations
ONE_OPERATION = {"binom", "abs_group", "floor_group", "ceil_group", "norm_group", "func", "det"}
SIGNED = {"additive", "mp", "mp_nofunc"}
EQUATIONS = {"relation", "set_elements_relation", "equality"}


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
    verdicts = {_compare_with(text, reference, unevaluated) for reference in references}
    best_first: tuple[Verdict, ...] = ("right", "unevaluated", "wrong")
    for verdict in best_first:
        if verdict in verdicts:
            return verdict
    return "unparsed"


def _compare_with(text: str, answer: str, unevaluated: bool) -> Verdict:
    """Compare an answer with one reference: as words, as text, as numerals, and at last as expressions."""
    reference = normal(answer)
    reference_word = _word(reference)
    if reference_word:
        return _right_if(reference_word == _word(text))
    # before anything is parsed: F_{10} is not a numeral, and words with a number are not a product
    if _without_upright(text) == _without_upright(reference):
        return "right"
    if _numeral(text) or _numeral(reference):
        return _right_if(_same_numeral(text, reference))
    # Math-Verify adds up two numbers side by side
    if re.search(r"(?<![_\d])\d+\s+\d", text):
        return "unparsed"
    expression = _parsed(text)
    if expression is None:
        return "right" if text == reference else "unparsed"
    for reading in _readings(answer, reference):
        known = _parsed(reading)
        if known is None or not equal(known, expression):
            continue
        if unevaluated or _is_evaluated(expression, text, known, reading):
            return "right"
        return "unevaluated"
    return "wrong"


def _right_if(is_right: bool) -> Verdict:
    return "right" if is_right else "wrong"


def _without_upright(text: str) -> str:
    r"""Return a text without the commands that set it upright, as ``\text{...}``."""
    return TEXT.sub(r"\1", text).strip()


def _word(text: str) -> str:
    """Return a text of letters alone in lower case, or nothing for any other and for a product of unknowns.

    Math-Verify takes ``ACBD`` for a product, equal to ``DBCA``. Lower-case letters in alphabetical order
    (``ab``, ``xyz``) are a product, as algebra writes it.
    """
    match = LETTERS.fullmatch(_without_upright(text).rstrip("."))
    if match is None:
        return ""
    letters = match[1]
    is_sorted = "".join(sorted(letters)) == letters
    if letters.islower() and is_sorted:
        return ""
    return letters.lower()


def _readings(answer: str, reference: str) -> list[str]:
    """Return how a reference can be read: ``100,200`` is a number, or else a list of two."""
    readings = [reference]
    if re.fullmatch(r"\s*\d{1,3}(?:,\d{3})+\s*", answer):
        readings.append(answer.replace(",", ", "))
    return readings


def _same_numeral(text: str, reference: str) -> bool:
    """Compare numerals of which at least one names its base; digits alone are in the base of the other."""
    numeral = _numeral(text)
    expected = _numeral(reference)
    if numeral and expected:
        same_value = int(numeral[1], int(numeral[2])) == int(expected[1], int(expected[2]))
        return same_value and numeral[2] == expected[2]
    digits = _digits_of_numeral(text)
    expected_digits = _digits_of_numeral(reference)
    return digits is not None and digits == expected_digits


def _digits_of_numeral(text: str) -> str | None:
    """Return the digits of a numeral with or without a base, or None where the text is not one."""
    match = _numeral(text) or re.fullmatch(r"([0-9A-Za-z]+)", text)
    if match is None:
        return None
    return match[1].lower().lstrip("0")


def _numeral(text: str) -> re.Match[str] | None:
    """Return a numeral with its base as a match, or nothing: the letter of ``x_1`` is not a digit."""
    match = BASE.fullmatch(text)
    if match is None or not 2 <= int(match[2]) <= 36:
        return None
    try:
        int(match[1], int(match[2]))
    except ValueError:
        return None
    return match


def _parsed(text: str) -> Any:
    """Return a normal answer as sympy's expression, or None."""
    from math_verify import LatexExtractionConfig, parse

    if _has_factors(text):
        # Math-Verify would add factors side by side where they are numbers
        text = re.sub(r"(?<=[\d})])\s*(?=\()|(?<=\))\s*(?=\d)", r" \\cdot ", text)
    matches = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], "no_fallback", parsing_timeout=None)
    return matches[0] if matches else None


def _has_factors(text: str) -> bool:
    """Return whether numbers stand side by side as factors: ``(12)(13)``, ``2(3)``."""
    return re.search(r"(?:\d|\d\))\s*\(\s*-?[\d.]+\s*\)|\(\s*-?[\d.]+\s*\)\s*\d", text) is not None


def equal(known: Any, parsed: Any) -> bool:
    """Return whether two expressions are equal; numbers by our tolerance, all else as Math-Verify says."""
    from math_verify import verify
    from sympy import FiniteSet, MatrixBase, Set, Tuple

    known = _right_hand_side(_only_element(known))
    parsed = _right_hand_side(_only_element(parsed))
    if isinstance(known, FiniteSet) and isinstance(parsed, FiniteSet):
        return _same_elements(known.args, parsed.args)
    if isinstance(known, Tuple) and isinstance(parsed, Tuple):
        return len(known) == len(parsed) and all(map(equal, known, parsed))
    if isinstance(known, MatrixBase) and isinstance(parsed, MatrixBase):
        return known.shape == parsed.shape and all(map(equal, known.flat(), parsed.flat()))
    if _is_number(known) and _is_number(parsed):
        pairs = product(_values(known), _values(parsed))
        return any(_same_number(expected, value) for expected, value in pairs)
    solved = isinstance(known, Set) and _is_solved(parsed)
    return bool(verify([known], [parsed], timeout_seconds=None, allow_set_relation_comp=solved))


def _same_elements(known: Sequence[Any], parsed: Sequence[Any]) -> bool:
    """Return whether the elements of two sets can be paired so that those of each pair are equal."""
    if len(known) != len(parsed):
        return False
    unmatched = list(parsed)
    for element in known:
        match = next((candidate for candidate in unmatched if equal(element, candidate)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _is_solved(expression: Any) -> bool:
    """Return whether an inequality says where one unknown lies: ``x>3`` or ``1<x<2``, and not ``x^2>9``."""
    from sympy import And, Symbol
    from sympy.core.relational import Relational

    relations = expression.args if isinstance(expression, And) else [expression]
    unknowns = set()
    other_sides = []
    for relation in relations:
        if not isinstance(relation, Relational):
            return False
        for side in relation.args:
            if isinstance(side, Symbol):
                unknowns.add(side)
            else:
                other_sides.append(side)
    has_free_side = any(side.free_symbols for side in other_sides)
    return len(unknowns) == 1 and not has_free_side


def _right_hand_side(expression: Any) -> Any:
    """Return the last side of ``x = 5``; other relations as they are."""
    from sympy import Eq, Symbol

    if isinstance(expression, Eq) and isinstance(expression.lhs, Symbol):
        return expression.rhs
    return expression


def _only_element(expression: Any) -> Any:
    """Return the element of a set that has one alone: ``{5}`` is 5."""
    from sympy import FiniteSet

    if isinstance(expression, FiniteSet) and len(expression.args) == 1:
        return expression.args[0]
    return expression


def _is_number(expression: Any) -> bool:
    from sympy import Expr, Symbol

    if not isinstance(expression, Expr):
        return False
    unknowns = {str(symbol) for symbol in expression.atoms(Symbol)}
    return unknowns <= {"i"}


def _values(expression: Any) -> list[Any]:
    """Return the values of a number: ``50\\%`` is 0.5, and 50 where percent are what was asked for."""
    from sympy import I, Rational, UnevaluatedExpr

    expression = expression.subs(dict.fromkeys(expression.free_symbols, I))
    values = [expression.doit()]
    percent = UnevaluatedExpr(Rational(1, 100))
    if expression.has(percent):
        values.append(expression.subs(percent, 1).doit())
    return values


def _same_number(expected: Any, value: Any) -> bool:
    """Return whether two numbers are equal: exactly, or as far as a decimal of six digits goes."""
    from sympy import Abs, Float, N, Rational, simplify

    if expected == value:
        return True
    if not expected.is_finite or not value.is_finite:
        return False
    exact_value = _exact(value)
    exact_expected = _exact(expected)
    precise_value = N(exact_value, 40)
    precise_expected = N(exact_expected, 40)
    difference = Abs(precise_value - precise_expected)
    size = max(Abs(precise_value), Abs(precise_expected))
    decimals = [number for number in (value, expected) if isinstance(number, Float)]
    if not decimals:
        if value.has(Float) or expected.has(Float):
            return not difference > size * RELATIVE
        if difference > size * 1e-25:
            return False
        return bool(simplify(expected - value) == 0) or bool(difference <= size * 1e-30)
    both_are_decimals = len(decimals) == 2
    has_exact_meaning = both_are_decimals or Rational(str(decimals[0])).is_integer
    if has_exact_meaning and exact_value == exact_expected:
        return True
    # with few digits a decimal stands for itself alone; with more, for what it rounds or cuts off
    if any(_digits(number) < DIGITS for number in decimals):
        return bool(difference <= size * 1e-12)
    tolerance = max(_last_place(number) for number in decimals)
    return bool(difference < tolerance * (1 - Rational(1, 10**9)))


def _exact(number: Any) -> Any:
    """Return a decimal as the fraction that it shows, not the binary number nearest to it."""
    from sympy import Float, Rational

    return Rational(str(number)) if isinstance(number, Float) else number


def _last_place(number: Any) -> Any:
    """Return the power of ten of the last digit that a decimal shows."""
    from sympy import Rational

    return Rational(10) ** _rendered(number)[1]


def _rendered(number: Any) -> tuple[str, int]:
    """Return the digits that a decimal shows, and the power of ten of the last."""
    from decimal import Decimal

    _, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    return "".join(map(str, digits)), int(exponent)


def _digits(number: Any) -> int:
    return len(_rendered(number)[0])


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
        allowed = max(count_ops(value), count_ops(known))
        return bool(count_ops(side) <= allowed)
    if unknowns and isinstance(side, Expr):
        value = expand(value.subs(dict.fromkeys(side.free_symbols, I)), complex=True)
    allowed = max(operations(normal(latex(value))), operations(reference))
    return operations(text) <= allowed


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
    """Return how many operations a node of the parse tree and all below it are."""
    children = list(getattr(node, "children", None) or [])
    if not children:
        return 0
    rule = parser.ruleNames[node.getRuleIndex()]
    tokens = []  # of each child its token's name, or nothing
    for child in children:
        is_token = hasattr(child, "symbol")
        tokens.append(parser.symbolicNames[child.symbol.type] if is_token else "")
    is_equation = "ASSIGNMENT" in tokens or "EQUAL" in tokens
    if is_equation and rule in EQUATIONS:
        return _count(children[-1], parser)
    operations_of_children = sum(_count(child, parser) for child in children)
    return operations_of_children + _operations_of_node(node, rule, tokens)


def _operations_of_node(node: Any, rule: str, tokens: Sequence[str]) -> int:
    """Return the operations that a node is itself, by its rule of the grammar and its tokens."""
    children = node.children
    if rule in SIGNED and len(children) == 3:
        is_division = tokens[1] in ("DIV", "COLON")
        if not is_division:
            return 1
        return _operations_of_fraction(children[0].getText(), children[2].getText())
    if rule == "frac":
        sides = re.fullmatch(r"\\frac\{(.*)\}\{(.*)\}", node.getText())
        return _operations_of_fraction(sides[1], sides[2]) if sides else 1
    if rule == "unary":  # numbers side by side are factors
        are_numbers = [NUMBER.fullmatch(child.getText()) is not None for child in children]
        return sum(number and next_number for number, next_number in pairwise(are_numbers))
    if rule in ONE_OPERATION or "CARET" in tokens or "BANG" in tokens:
        return 1
    return 0


def _operations_of_fraction(numerator: str, denominator: str) -> int:
    """Return 0 for a fraction of two integers that has to stay, and 1 for any other: that can be computed."""
    if not re.fullmatch(r"-?\d+", numerator) or not re.fullmatch(r"-?\d+", denominator):
        return 1
    if int(denominator) == 0:
        return 1
    is_whole_number = int(numerator) % int(denominator) == 0
    return 1 if is_whole_number else 0
