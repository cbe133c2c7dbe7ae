"""Ops with one mistake each in their declaration."""

from rlgraph.ops import float32, op, samples, text, tokens

LIMIT = 3


@op()
def untyped(responses: text[samples], limit) -> float32[samples]:
    """A parameter without an annotation."""


@op()
def odd(responses: text[tokens]) -> float32[samples]:
    """A token axis where the domain stands."""


@op()
def returns_list(responses: text[samples]) -> list[float]:
    """No column type."""


@op(makes="samples", times="k")
def times(responses: text[samples]) -> float32[samples]:
    """An attribute that is not there."""


@op()
def rowless() -> float32[samples]:
    """Reads nothing, and makes no rows."""
