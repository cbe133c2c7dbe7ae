"""Advantages from a teacher's log-probs, token by token.

Shapes: ``[samples, tokens]`` is a ``Ragged`` column of log-probs in nats.
"""

from __future__ import annotations

from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, boolean, float32, op, samples, tokens


@op()
def distill(
    ctx: Context,
    teacher_logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
) -> float32[samples, tokens]:
    """On-policy distillation (arXiv 2306.13649, 2306.08543): a teacher's log-prob less the student's.

    A_t = log p_teacher(token t) - log p_student(token t), both before t, on what the student sampled: the
    policy gradient of -KL(student, teacher) at each token, where later tokens don't count. 0 where
    ``loss_mask`` is false. Records ``kl``, the mean of -A: an estimate of the KL, nats per token.

    Example:
        advantages: {op: advantage.distill}
    """
    gap = torch.where(loss_mask.values, teacher_logprobs.values - old_logprobs.values, 0)
    ctx.record("kl", -float(gap.double().sum()), count=int(loss_mask.values.sum()))
    return loss_mask.like(gap.float())
