"""A penalty for responses that come near the limit of their length."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlgraph.ops import Context, boolean, float32, op, samples, tokens


@op()
def overlong(
    ctx: Context,
    rewards: float32[samples],
    loss_mask: boolean[samples, tokens],
    *,
    limit: Annotated[int, Field(ge=1)],
    buffer: Annotated[int, Field(ge=1)],
    penalty: Annotated[float, Field(ge=0)] = 1.0,
) -> float32[samples]:
    """The reward less a penalty that grows over the last tokens of the limit (DAPO, arXiv 2503.14476).

    s - penalty clip((len - (limit - buffer)) / buffer, 0, 1), len the tokens of a sample in its loss mask:
    nothing up to limit - buffer, then linear, the whole penalty at the limit. Records
    ``reward/overlong``, the mean of what is taken away.

    Attributes:
        limit: tokens that a response may have, at least 1: the rollout's max_new_tokens.
        buffer: how many tokens before the limit the penalty begins, at least 1.
        penalty: what a response at the limit loses, in units of the reward, at least 0.

    Example:
        overlong: {op: reward.overlong, limit: 1024, buffer: 256}
    """
    excess = (loss_mask.sum() - (limit - buffer)) / buffer
    lost = penalty * excess.clamp(0, 1)
    ctx.record("reward/overlong", lost)
    return rewards - lost.to(rewards.dtype)
