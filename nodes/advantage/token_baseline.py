"""Advantages over a baseline of each token's own, from the samples of one prompt.

Shapes: ``[samples, tokens]`` is a ``Ragged`` column; ``[written]`` one entry for each token in the loss mask,
row by row. Sums run in float64, so that the order of rows doesn't show in float32.
"""

from __future__ import annotations

from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import boolean, float32, int64, op, samples, tokens

EPSILON = 1e-8  # tokens; added to a sum of weights


@op(rows="group", assumes=("groups",))
def optimal_token_baseline(
    rewards: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    squares: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    group: int64[samples],
) -> float32[samples, tokens]:
    """Return-to-go less the baseline of least variance at each token (OTB, arXiv 2602.07078).

    A_t = G_t - sum(G_t W_t) / (sum W_t + 1e-8), over the samples of a prompt that wrote a t-th token; G_t is
    the sum of rewards from it on, and W_t = sum over k <= t of 1 - 2 pi_k + sum_v p_v^2, pi_k = exp
    ``old_logprobs``: what stands for the squared norm of the gradient up to t, from forward probabilities
    alone. Tokens are counted in the loss mask: those outside it (tool output) are passed over, and A is 0
    there. A t-th token that no other sample of the group has, and a group of one, keep G_t.

    Example:
        advantages: {op: advantage.optimal_token_baseline, in: {rewards: shaped}}
    """
    written = loss_mask.values
    rows = loss_mask.row_of[written]
    energy = 1 - 2 * old_logprobs.values[written].double().exp() + squares.values[written].double()
    weights = _so_far(energy.clamp(min=0), rows, len(loss_mask))  # rounding makes some of them negative
    earned = rewards.values[written].double()
    to_go = _whole(earned, rows, len(loss_mask))[rows] - _so_far(earned, rows, len(loss_mask)) + earned
    together = _cells(rows, group)
    count = torch.bincount(together)
    above = torch.zeros(len(count), dtype=torch.float64).index_add(0, together, to_go * weights)
    below = torch.zeros(len(count), dtype=torch.float64).index_add(0, together, weights)
    baseline = torch.where(count > 1, above / (below + EPSILON), 0)
    out = torch.zeros(len(written), dtype=torch.float64)
    out[written] = to_go - baseline[together]
    return loss_mask.like(out.float())


def _cells(rows: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Number each token ``[written]``: the t-th tokens of the samples of one group have the same number."""
    _, members = torch.unique(group, return_inverse=True)
    ones = torch.ones(len(rows), dtype=torch.int64)
    place = _so_far(ones.double(), rows, len(group)).long() - 1
    longest = int(place.max()) + 1 if len(place) else 1
    return members[rows] * longest + place


def _whole(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum of each row ``[samples]``."""
    return torch.zeros(count, dtype=torch.float64).index_add(0, rows, values)


def _so_far(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum of each token's row up to and with it ``[written]``."""
    before = torch.nn.functional.pad(_whole(values, rows, count).cumsum(0), (1, 0))[:-1]
    return values.cumsum(0) - before[rows]
