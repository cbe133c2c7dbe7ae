"""Advantages over a baseline that is sampled: the reward of a greedy response to the same prompt.

Shapes: ``[samples, tokens]`` is a ``Ragged`` column; ``[all tokens]`` its flat values. Sums run in float64,
so that the order of rows doesn't show in float32.
"""

from __future__ import annotations

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import boolean, float32, op, samples, tokens


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
    written = loss_mask.values
    advantage = _to_go(rewards, loss_mask) - loss_mask.spread(greedy_rewards.double()).values
    return loss_mask.like(torch.where(written, advantage, 0).float())


def _to_go(rewards: Ragged, loss_mask: Ragged) -> torch.Tensor:
    """Return the sum of rewards from each token to the end of its row, ``[all tokens]`` in float64."""
    counted = rewards.like(torch.where(loss_mask.values, rewards.values.double(), 0))
    before = counted.values.cumsum(0) - counted.values  # summed over all rows laid end to end
    ends = counted.spread(torch.nn.functional.pad(counted.values.cumsum(0), (1, 0))[counted.offsets[1:]])
    return ends.values - before
