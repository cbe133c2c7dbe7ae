"""Advantages from several rewards.

Shapes: ``[samples, tokens]`` is a ``Ragged`` column. Groups are those of ``rlgraph.nodes.advantage.group``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlgraph.nodes.advantage.gae import whitened
from rlgraph.nodes.advantage.group import centred_by_group, deviation
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import boolean, float32, int64, op, samples, tokens

OTHERS = {"rewards_2": "weight_2", "rewards_3": "weight_3", "rewards_4": "weight_4"}


@op(rows="all", assumes=("groups",), when=OTHERS)
def gdpo(
    rewards: float32[samples],
    rewards_2: float32[samples] | None,
    rewards_3: float32[samples] | None,
    rewards_4: float32[samples] | None,
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    weight: float = 1.0,
    weight_2: float = 1.0,
    weight_3: float = 0.0,
    weight_4: float = 0.0,
    eps: Annotated[float, Field(gt=0)] = 1e-6,
) -> float32[samples, tokens]:
    """Decoupled normalisation of several rewards (GDPO, arXiv 2601.05242).

    A = whiten(sum_k w_k (s_k - mu_k) / (sigma_k + eps)), mu_k and sigma_k those of reward k in the group, as
    in advantage.grpo: rewards that are added before they are normalised give equal advantages to samples that
    earned them in different ways. whiten(x) = (x - mean) / sqrt(unbiased variance + 1e-8) over all tokens in
    the loss mask of the batch; the paper takes both over samples. A group of one has mu = 0 and sigma = 1. 0
    where ``loss_mask`` is false. A reward of weight 0 is not read.

    Attributes:
        weight: of ``rewards``.
        weight_2: of ``rewards_2``.
        weight_3: of ``rewards_3``.
        weight_4: of ``rewards_4``.
        eps: what is added to each standard deviation, in units of its reward, above 0.

    Example:
        advantages: {op: advantage.gdpo, in: {rewards_2: formatted}, weight_2: 0.5}
    """
    weighed = [(rewards, weight), (rewards_2, weight_2), (rewards_3, weight_3), (rewards_4, weight_4)]
    read = [(column, factor) for column, factor in weighed if column is not None]
    per_sample = sum(factor * _normalised(column, group, eps) for column, factor in read)
    return whitened(loss_mask.spread(per_sample), loss_mask)


def _normalised(rewards: torch.Tensor, group: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (s - mu) / (sigma + eps) of the sample's group, in float64 ``[samples]``."""
    centred, members, count = centred_by_group(rewards, group)
    return centred / (deviation(centred, members, count).masked_fill(count == 1, 1.0)[members] + eps)
