"""A weighted sum of rewards."""

from __future__ import annotations

from rlgraph.ops import Context, float32, op, samples

OTHERS = {"rewards_2": "weight_2", "rewards_3": "weight_3", "rewards_4": "weight_4"}


@op(when=OTHERS)
def total(
    ctx: Context,
    rewards: float32[samples],
    rewards_2: float32[samples] | None,
    rewards_3: float32[samples] | None,
    rewards_4: float32[samples] | None,
    *,
    weight: float = 1.0,
    weight_2: float = 1.0,
    weight_3: float = 0.0,
    weight_4: float = 0.0,
) -> float32[samples]:
    """sum_k w_k s_k of two to four rewards per sample; one of weight 0 is not read.

    Linear scalarisation (Roijers et al. 2013, doi 10.1613/jair.3987); advantage.gdpo normalises each reward
    before it adds them. Records ``mean`` under the node's name.

    Attributes:
        weight: of ``rewards``.
        weight_2: of ``rewards_2``.
        weight_3: of ``rewards_3``.
        weight_4: of ``rewards_4``.

    Example:
        scores: {op: reward.sum, in: {rewards_2: formatted}, weight_2: 0.1}
    """
    weighed = [(rewards_2, weight_2), (rewards_3, weight_3), (rewards_4, weight_4)]
    out = weight * rewards
    for column, factor in weighed:
        out = out if column is None else out + factor * column
    ctx.record("mean", out)
    return out
