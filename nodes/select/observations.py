"""The mask of what a policy was told in a conversation, beside that of what it wrote."""

from __future__ import annotations

from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import boolean, op, samples, tokens


@op()
def observations(loss_mask: boolean[samples, tokens]) -> boolean[samples, tokens]:
    """True on each token behind the policy's first one that it did not write: what tools or others said.

    Of a row that it wrote nothing of, on none. What the chat template writes around an answer is part of it.
    A loss on these has the policy predict what its actions lead to (ECHO, arXiv 2605.24517).

    Example:
        observed: {op: mask.observations}
    """
    mask, row, place = loss_mask.values, loss_mask.row_of, loss_mask.place_of
    first = torch.full((len(loss_mask),), len(mask)).scatter_reduce(0, row[mask], place[mask], "amin")
    return loss_mask.like(~mask & (place > loss_mask.spread(first).values))
