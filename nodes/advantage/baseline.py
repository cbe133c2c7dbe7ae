"""Advantages over a baseline for each prompt or token: a greedy response, or the samples of a group.

Sums run in float64, so that the order of rows doesn't show in float32.
"""

from __future__ import annotations

from rlgraph.nodes.advantage.gae import compact, scatter
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import boolean, float32, int64, op, samples, tokens

EPSILON = 1e-8  # tokens; added to a sum of weights


@op(assumes=("greedy_baseline",))
def remax(
    rewards: float32[samples, tokens], greedy_rewards: float32[samples], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """Return-to-go less the reward of the greedy sample of the same prompt (ReMax, arXiv 2310.10505).

    A_t = sum of r_k over k >= t, less ``greedy_rewards``: a baseline that depends on the prompt alone, so it
    adds no bias. ``greedy_rewards`` is the reward of what a second rollout makes of the prompts, with
    ``n: 1, temperature: 0``: a row per prompt, repeated to its samples. Returns pass through tokens outside
    the loss mask (tool output), where A is 0 and rewards don't count.

    Example:
        advantages: {op: advantage.remax, in: {rewards: shaped}}
    """
    earned = compact(rewards, loss_mask)
    sums = earned.values.cumsum(0)  # over all rows laid end to end
    ends = earned.spread(torch.nn.functional.pad(sums, (1, 0))[earned.offsets[1:]]).values
    to_go = ends - (sums - earned.values)
    return scatter(to_go - earned.spread(greedy_rewards.double()).values, loss_mask)


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
    earned = compact(rewards, loss_mask)
    energy = 1 - 2 * compact(old_logprobs, loss_mask).values.exp() + compact(squares, loss_mask).values
    weights = _so_far(earned.like(energy.clamp(min=0)))  # rounding makes some of them negative
    to_go = earned.spread(earned.sum()).values - _so_far(earned) + earned.values
    _, members = torch.unique(group, return_inverse=True)
    width = max(earned.lengths.tolist(), default=0)
    together = earned.spread(members).values * width + earned.place_of  # one number for a group's t-th tokens
    count = torch.bincount(together)
    above = torch.zeros(len(count), dtype=torch.float64).index_add(0, together, to_go * weights)
    below = torch.zeros(len(count), dtype=torch.float64).index_add(0, together, weights)
    baseline = torch.where(count > 1, above / (below + EPSILON), 0)
    return scatter(to_go - baseline[together], loss_mask)


def _so_far(column: Ragged) -> torch.Tensor:
    """Return the sum of each token's row up to and with it ``[all tokens]``."""
    before = torch.nn.functional.pad(column.sum().cumsum(0), (1, 0))[:-1]
    return column.values.cumsum(0) - column.spread(before).values
