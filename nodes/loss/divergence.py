"""Policy losses whose trust region is a divergence of distributions, not a ratio of probabilities.

A distribution over the vocabulary is taken as one over two outcomes, the sampled token and any other, so that
the log-probs of the sampled tokens are enough.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat

from rlgraph.nodes.loss.ratio import ratio
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import float32, op, samples, tokens

TINY = 1e-8  # added to 1 - p, which is 0 for a token that is certain


@op(assumes=("sampling_logprobs",))
def dppo_tv(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    *,
    limit: Annotated[float, Field(gt=0, le=1)] = 0.2,
    limit_high: Annotated[float, Field(gt=0, le=1)] | None = None,
    cap: Annotated[float, Field(ge=1)] = 20.0,
) -> float32[samples, tokens]:
    """Divergence PPO with total variation (DPPO-Binary-TV, arXiv 2602.04879).

    -A sg(min(rho, cap)) logprobs while the policy is in its trust region, else 0: where A > 0, p - p_old <=
    limit_high; elsewhere p - p_old >= -limit. p = exp(logprobs), rho = exp(clamp(logprobs - old_logprobs,
    -20, 20)), sg the stop of gradients. So a rare token may grow by a large ratio, and a likely one may not
    lose much. The paper measures from the probabilities of the engine that sampled; so does ``in:
    {old_logprobs: rollout_logprobs}``.

    Attributes:
        limit: how much probability a token may lose, above 0 and at most 1; also how much it may gain, unless
            ``limit_high`` is given.
        limit_high: how much probability a token may gain, above 0 and at most 1.
        cap: the largest ratio that counts, at least 1.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: dppo_tv, limit: 0.2}}
    """
    gained = logprobs.values.detach().exp() - old_logprobs.values.exp()
    high = limit if limit_high is None else limit_high
    inside = torch.where(advantages.values > 0, gained <= high, gained >= -limit)
    return _trusted(logprobs, old_logprobs, advantages, inside, cap)


@op(assumes=("sampling_logprobs",))
def dppo_kl(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    *,
    limit: PositiveFloat = 0.05,
    limit_high: PositiveFloat | None = None,
    cap: Annotated[float, Field(ge=1)] = 20.0,
) -> float32[samples, tokens]:
    """Divergence PPO with the Kullback-Leibler divergence (DPPO-Binary-KL, arXiv 2602.04879).

    -A sg(min(rho, cap)) logprobs while the policy is in its trust region, else 0: where A > 0, D <=
    limit_high or p <= p_old; elsewhere D <= limit or p >= p_old. D = p_old log(p_old / p) + (1 - p_old)
    log((1 - p_old) / (1 - p)), in nats, p = exp(logprobs); rho and sg as in dppo_tv.

    Attributes:
        limit: the divergence up to which a token may lose probability, in nats, above 0; also up to which it
            may gain probability, unless ``limit_high`` is given.
        limit_high: the divergence up to which a token may gain probability, in nats, above 0.
        cap: the largest ratio that counts, at least 1.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: dppo_kl, limit: 0.05}}
    """
    now, old = logprobs.values.detach(), old_logprobs.values
    divergence = binary_kl(old, now)
    high = limit if limit_high is None else limit_high
    rises, falls = (divergence <= high) | (now <= old), (divergence <= limit) | (now >= old)
    return _trusted(logprobs, old_logprobs, advantages, torch.where(advantages.values > 0, rises, falls), cap)


def binary_kl(old_logprobs: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return KL(old, now) of the outcomes "this token" and "any other", in nats, ``[all tokens]``."""
    old, now = old_logprobs.exp(), logprobs.exp()
    other = ((1 - old + TINY) / (1 - now + TINY)).log()
    return old * (old_logprobs - logprobs) + (1 - old) * other


def _trusted(
    logprobs: Ragged, old_logprobs: Ragged, advantages: Ragged, inside: torch.Tensor, cap: float
) -> Ragged:
    """Return -A sg(min(rho, cap)) logprobs inside the trust region, 0 outside it."""
    weight = ratio(logprobs.values.detach(), old_logprobs.values).clamp(max=cap)
    return logprobs.like(-advantages.values * weight * logprobs.values * inside)
