"""Arithmetic on real numbers, by simpleeval: an expression is parsed and walked, never run as Python.

Before anything is computed every part of it must be one of ``ARITHMETIC``, and each constant a number. Each
operator and function then gets numbers alone, and its result has at most ``BITS`` bits.
"""

import ast
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 500  # characters in an expression
BITS = 4096  # bits in a whole number
DIGITS = 400  # decimal places, to either side, that numbers are rounded to
ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Call, ast.Name, ast.Load, ast.Constant)


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and brackets, and sqrt, abs, round, min, max.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    try:
        result = _evaluator().eval(expression, _parsed(expression.strip().replace("^", "**")))
    except RecursionError:
        raise ValueError("the expression is nested too deeply") from None
    if type(result) not in (int, float):
        raise ValueError("this is not arithmetic: it names a function without calling it")
    return _written(result)


def _parsed(expression: str) -> ast.expr:
    """Return an expression as a tree of numbers, names, operators and calls, and of nothing else."""
    tree = ast.parse(expression, mode="eval").body
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and type(node.value) not in (int, float)
        if is_text or not isinstance(node, ARITHMETIC):
            raise ValueError(f"this is not arithmetic: {ast.unparse(node)[:40]}")
    return tree


@functools.cache
def _evaluator() -> Any:
    """Return an evaluator that knows numbers, these operators and functions; it runs no Python (no eval)."""
    from simpleeval import SimpleEval

    operators: dict[type[ast.AST], Callable[..., Any]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: _product,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: _power,
        ast.USub: operator.neg,
        ast.UAdd: operator.pos,
    }
    functions: dict[str, Callable[..., Any]] = {
        "sqrt": math.sqrt,
        "abs": abs,
        "round": _rounded,
        "min": min,
        "max": max,
    }
    return SimpleEval(
        operators={operator_type: _of_numbers(function) for operator_type, function in operators.items()},
        functions={name: _of_numbers(function) for name, function in functions.items()},
        names={"pi": math.pi, "e": math.e},
    )


def _of_numbers(function: Callable[..., Any]) -> Callable[..., float]:
    """Return a function that refuses all but real numbers, and a result that is too large."""

    def checked(*numbers: Any) -> float:
        if not all(type(number) in (int, float) for number in numbers):
            raise ValueError("only numbers are computed with")
        result = function(*numbers)
        if type(result) is not int and type(result) is not float:
            raise ValueError("the result is not a real number")
        _bounded(_bits(result))
        return result

    return checked


def _product(multiplier: float, factor: float) -> float:
    _bounded(_bits(multiplier) + _bits(factor))
    return multiplier * factor


def _power(base: float, exponent: float) -> Any:
    if isinstance(base, int) and isinstance(exponent, int):
        _bounded(_bits(base) * abs(exponent))
    return base**exponent


def _rounded(number: float, digits: float = 0) -> float:
    if not isinstance(digits, int) or abs(digits) > DIGITS:
        raise ValueError(f"numbers are rounded to at most {DIGITS} places")
    return round(number, digits or None)


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 64


def _bounded(bits: int) -> None:
    if bits > BITS:
        raise ValueError("the result is too large")


def _written(number: float) -> str:
    """Write a whole number as such, any other with twelve digits."""
    if isinstance(number, int):
        return str(number)
    is_exact = abs(number) < 2**53
    if is_exact and number.is_integer():
        return str(int(number))
    return f"{number:.12g}"
