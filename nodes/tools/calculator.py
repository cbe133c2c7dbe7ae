"""Arithmetic, by simpleeval: an expression is parsed and walked, never run as Python."""

from __future__ import annotations

import functools
import operator
from typing import Any

LONGEST = 500  # characters in an expression
BITS = 4096  # bits in a whole number


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and brackets, and sqrt, abs, round, min, max.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    result = _evaluator().eval(expression.strip().replace("^", "**"))
    if isinstance(result, bool) or not isinstance(result, int | float):
        raise ValueError("this is not arithmetic")
    return _written(result)


@functools.cache
def _evaluator() -> Any:
    """Return an evaluator that knows numbers, these operators and functions; it runs no Python (no eval)."""
    import ast
    import math

    from simpleeval import SimpleEval

    operators = {
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
    functions = {"sqrt": math.sqrt, "abs": abs, "round": round, "min": min, "max": max}
    return SimpleEval(operators=operators, functions=functions, names={"pi": math.pi, "e": math.e})


def _product(left: Any, right: Any) -> Any:
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        raise ValueError("only numbers are multiplied")
    _bounded(_bits(left) + _bits(right))
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, int):
        _bounded(_bits(base) * abs(exponent))
    return base**exponent


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 64


def _bounded(bits: int) -> None:
    if bits > BITS:
        raise ValueError("the result is too large")


def _written(number: float) -> str:
    """Write a whole number as such, any other with twelve digits."""
    if isinstance(number, int) or (number.is_integer() and abs(number) < 2**53):
        return str(int(number))
    return f"{number:.12g}"
