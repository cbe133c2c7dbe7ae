"""A critic's value estimates."""

from __future__ import annotations

from rlgraph.ops import TrainEngine, boolean, float32, int64, op, samples, tokens


@op(head="value")
def values(
    model: TrainEngine, tokens: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """The critic's estimate of the return before each token that the policy wrote.

    V_t reads the tokens before t only, in units of the reward; 0 where ``loss_mask`` is false
    (PPO, arXiv 1707.06347). The model needs ``head: value``.

    Example:
        values: {op: values, model: critic}
    """
    return model.values(tokens, loss_mask)
