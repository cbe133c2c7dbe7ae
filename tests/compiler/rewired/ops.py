"""An op to insert."""

from __future__ import annotations

from rlgraph.ops import float32, int64, op, samples, tokens


@op()
def length_penalty(
    rewards: float32[samples], tokens: int64[samples, tokens], *, coef: float = 0.001
) -> float32[samples]:
    """Rewards less `coef` for each token."""
    return rewards - coef * tokens.lengths
