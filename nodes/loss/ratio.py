"""Importance ratios of a policy now to an older one, of single tokens and of whole sequences.

A sequence is what its loss mask covers; one that it doesn't cover at all has ratio 1.
"""

from __future__ import annotations

from typing import Literal

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged

RatioLevel = Literal["token", "sequence", "product"]

LOG_RATIO_LIMIT = 20.0


def ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return rho = exp(logprobs - old_logprobs), the exponent clamped to +-20, ``[all tokens]``."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ratio_of(
    logprobs: Ragged, old_logprobs: Ragged, loss_mask: Ragged | None, level: RatioLevel
) -> torch.Tensor:
    """Return each token's ratio, or one of its sequence with the gradient of the token's own log-prob.

    By token it is rho of ``ratio``. By sequence it is s = exp(lp - sg(lp) + sg(mean_t(lp - old))), the mean
    over the sequence's loss mask and clamped to +-20, sg the stop of gradients (GSPO-token, arXiv 2507.18071,
    eq. 14). Where all tokens of a sequence weigh the same, the gradient of its sum of losses is that of the
    ratio exp(mean_t(lp - old)) itself. The product is the ratio of whole responses, exp(sum_t(lp - old)),
    with its own gradient: of the mean of a sequence's losses each token has that of -A times the ratio.
    """
    now = logprobs.values
    if level == "token":
        return ratio(now, old_logprobs.values)
    assert loss_mask is not None, "the ratio of a sequence is that of its loss mask"
    if level == "product":
        return sequence_ratio(now, old_logprobs, loss_mask, level)
    straight_through = (now - now.detach()).exp()  # 1, with the gradient of the token's log-prob
    return sequence_ratio(now.detach(), old_logprobs, loss_mask, level) * straight_through


def sequence_ratio(
    logprobs: torch.Tensor, old_logprobs: Ragged, loss_mask: Ragged, level: RatioLevel = "sequence"
) -> torch.Tensor:
    """Return exp(mean_t(logprobs - old_logprobs)) of each token's sequence, exponent in +-20.

    With ``level`` product it is exp(sum_t(logprobs - old_logprobs)).
    """
    moved = old_logprobs.like(logprobs - old_logprobs.values)
    mean = masked_mean(moved, loss_mask)
    exponent = mean * loss_mask.sum() if level == "product" else mean
    return loss_mask.spread(exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()).values


def masked_mean(column: Ragged, loss_mask: Ragged) -> torch.Tensor:
    """Return each row's mean over its loss mask ``[samples]``; 0 for a row without one."""
    masked = column.like(torch.where(loss_mask.values, column.values, 0))
    return masked.sum() / loss_mask.sum().clamp(min=1)
