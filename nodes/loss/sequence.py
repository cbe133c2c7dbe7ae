"""Policy losses whose ratio is that of a whole sequence.

A sequence is what its loss mask covers; one that it doesn't cover at all has ratio 1 and adds nothing. Each
gives a loss per token that ``aggregate`` turns into the mean over sequences that its paper defines.
"""

from __future__ import annotations

from pydantic import PositiveFloat

from rlgraph.nodes.loss.policy import ppo_clip
from rlgraph.nodes.loss.ratio import LOG_RATIO_LIMIT, masked_mean
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import boolean, float32, op, samples, tokens


@op(assumes=("sampling_logprobs",))
def gspo(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    clip: PositiveFloat = 3e-4,
    clip_high: PositiveFloat = 4e-4,
) -> float32[samples, tokens]:
    """Clipped loss of a sequence's ratio (GSPO, arXiv 2507.18071).

    max(-A s, -A clip(s, 1 - clip, 1 + clip_high)), s = exp(lp - sg(lp) + sg(mean_t(lp - old))), the mean over
    the sequence's loss mask and clamped to +-20, sg the stop of gradients. Every token of a sequence has the
    value of its sequence's ratio, and the gradient of its own log-prob. Use it with ``aggregate:
    seq-mean-token-mean``, which makes the gradient that of the ratio exp(mean_t(lp - old)). It is ppo_clip
    with ``level: sequence`` and these clips.

    Attributes:
        clip: how far below 1 the sequence's ratio may count, above 0; far smaller than a token's.
        clip_high: how far above 1 the sequence's ratio may count, above 0.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: gspo}, aggregate: seq-mean-token-mean}
    """
    return ppo_clip(
        logprobs, old_logprobs, advantages, loss_mask, level="sequence", clip=clip, clip_high=clip_high
    )


@op(assumes=("sampling_logprobs",))
def geo_mean(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    log_clip: PositiveFloat = 0.4,
    log_clip_high: PositiveFloat = 0.4,
) -> float32[samples, tokens]:
    """Geometric-mean policy optimisation (GMPO, arXiv 2507.20673): a mean that no token dominates.

    -A exp(mean_t(d)), d = sign(A) min(sign(A) l, sign(A) clamp(l, -log_clip, log_clip_high)), l =
    clamp(logprobs - old_logprobs, -20, 20), means over the sequence's loss mask, A the mean of its
    advantages. Log ratios are clipped on the side to which the advantage pushes. Each token of a sequence has
    the sequence's loss: use it with ``aggregate: seq-mean-token-mean``.

    Attributes:
        log_clip: how far below 0 a token's log ratio may count where A < 0, in nats, above 0.
        log_clip_high: how far above 0 it may count where A > 0, in nats, above 0.

    Example:
        update: {op: update.policy, model: policy, loss: {kind: geo_mean}, aggregate: seq-mean-token-mean}
    """
    sign = advantages.values.sign()
    log_ratio = (logprobs.values - old_logprobs.values).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-log_clip, log_clip_high))
    mean_ratio = masked_mean(logprobs.like(clipped), loss_mask).exp()
    return logprobs.spread(-masked_mean(advantages, loss_mask) * mean_ratio)


@op(assumes=("sampling_logprobs", "token_sum"))
def vespo(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    power: PositiveFloat = 2.0,
    decay: PositiveFloat = 3.0,
    power_negative: PositiveFloat = 3.0,
    decay_negative: PositiveFloat = 2.0,
) -> float32[samples, tokens]:
    """Softly weighted sequences, for stale rows (VESPO, arXiv 2602.10693).

    -sg(W^k exp(l (1 - W))) A logprobs, W = exp(clamp(sum_t (logprobs - old_logprobs), -20, 20)), the sum over
    the sequence's loss mask: not divided by its length, as in gspo. k, l = ``power``, ``decay`` where A >= 0,
    else ``power_negative``, ``decay_negative``. The weight is 1 at W = 1 and goes to 0 on both sides, so
    nothing is clipped; it is largest at W = k / l. sg is the stop of gradients. Only with ``aggregate:
    seq-mean-token-sum`` is it -A times the log-prob of a whole response.

    Attributes:
        power: how fast responses that became less likely lose weight, where A >= 0, above 0.
        decay: how fast responses that became more likely lose weight, where A >= 0, above 0.
        power_negative: as ``power``, where A < 0.
        decay_negative: as ``decay``, where A < 0.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: vespo}, aggregate: seq-mean-token-sum}
    """
    moved = torch.where(loss_mask.values, logprobs.values.detach() - old_logprobs.values, 0)
    whole = logprobs.like(moved).sum().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_ratio, gains = logprobs.spread(whole).values, advantages.values >= 0
    k = torch.where(gains, power, power_negative).to(log_ratio.dtype)
    rate = torch.where(gains, decay, decay_negative).to(log_ratio.dtype)
    weight = (k * log_ratio + rate * (1 - log_ratio.exp())).exp()
    return logprobs.like(-weight * advantages.values * logprobs.values)
