"""Masks of tokens: which of a sample's a loss or an estimator is about."""

from __future__ import annotations

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import boolean, int64, op, samples, tokens


@op()
def observations(
    turn: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> boolean[samples, tokens]:
    """What a policy was answered: the tokens behind the prompt that tools and users wrote.

    True where ``turn`` is above 0 and ``loss_mask`` is false. What stands around an answer, as the chat
    template writes it, is part of it. A loss on these tokens lets a policy learn what its actions lead to.

    Example:
        observed: {op: mask.observations}
    """
    return Ragged((turn.values > 0) & ~loss_mask.values, turn.offsets)
