"""The one call of a policy loss of verl's that several files ``ask_NAME.py`` make."""

from __future__ import annotations

import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig


def policy_loss(
    mode: str, given: dict[str, torch.Tensor], old: str, aggregate: str, config: ActorConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return verl's loss, and the log-probs that its gradient is of.

    Args:
        mode: verl's name of the loss.
        given: the columns ``[rows, tokens]``: logprobs, advantages, mask and ``old``.
        old: the column of the log-probs that the ratio is to.
        aggregate: verl's name of the mean.
        config: of the actor.
    """
    logprobs = given["logprobs"].clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=given[old],
        log_prob=logprobs,
        advantages=given["advantages"],
        response_mask=given["mask"],
        loss_agg_mode=aggregate,
        config=config,
    )
    return loss, logprobs
