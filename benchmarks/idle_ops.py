"""Ops that do nothing, for ``orchestration.py``: what remains is the cost of walking a plan."""

from typing import NamedTuple

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, float32, int64, op, prompts, samples, tokens


class Sampled(NamedTuple):
    tokens: int64[samples, tokens]
    scores: float32[samples]


@op(makes="prompts", rows="all")
def source(ctx: Context, *, batch: int) -> int64[prompts]:
    """Row numbers."""
    import torch

    return torch.arange(batch)


@op(makes="samples", times="n", rows="each")
def spread(number: int64[prompts], *, n: int) -> Sampled:
    """``n`` samples of one token for each row."""
    import torch

    rows = len(number) * n
    return Sampled(Ragged(torch.zeros(rows, dtype=torch.int64), torch.arange(rows + 1)), torch.zeros(rows))


@op()
def each(scores: float32[samples]) -> float32[samples]:
    """What it read."""
    return scores


@op(rows="group")
def group(scores: float32[samples], tokens: int64[samples, tokens]) -> float32[samples]:
    """What it read."""
    return scores


@op(rows="all")
def whole(scores: float32[samples], tokens: int64[samples, tokens]) -> float32[samples]:
    """What it read."""
    return scores
