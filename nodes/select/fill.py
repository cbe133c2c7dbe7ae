"""A column of one number, for rows that have none of their own."""

from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import float32, int64, op, samples, tokens


@op()
def fill(tokens: int64[samples, tokens], *, value: float) -> float32[samples, tokens]:
    """The same number at every token, such as the advantage of examples that share an update with a rollout.

    Attributes:
        value: the number, in units of the column that it replaces.

    Example:
        example_advantages: {op: fill, rows: examples, value: 1, out: {example_advantages: advantages}}
    """
    return tokens.like(torch.full_like(tokens.values, value, dtype=torch.float32))
